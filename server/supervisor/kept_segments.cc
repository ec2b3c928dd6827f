#include "server/supervisor/kept_segments.h"

namespace optstate::supervisor {

void HandOverKept(const KeptByJob& kept, v1::SupervisorHandover* handover) {
  for (const auto& [job, segments] : kept) {
    for (const auto& [rank, segment] : segments) {
      v1::SupervisorHandover::Kept& one = *handover->add_kept();
      one.set_job(job);
      *one.mutable_gradients() = segment.info;
      one.set_fd(segment.segment->get());
    }
  }
}

KeptByJob InheritKept(const v1::SupervisorHandover& handover) {
  KeptByJob kept;
  for (const auto& one : handover.kept()) {
    kept[one.job()][one.gradients().rank()] = {
        one.gradients(), std::make_shared<const UniqueFd>(one.fd())};
  }
  return kept;
}

}  // namespace optstate::supervisor
