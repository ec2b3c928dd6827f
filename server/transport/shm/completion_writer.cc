#include "server/transport/shm/completion_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace optstate::transport {

CompletionWriter::CompletionWriter(const ShmSegments* segments,
                                   SessionHandler* handler, NoticeSink notices,
                                   std::function<void()> on_failure)
    : segments_(segments),
      handler_(handler),
      notices_(std::move(notices)),
      on_failure_(std::move(on_failure)),
      producer_(segments->engine_ring(), segments->client_ring(),
                segments->completions()) {}

absl::Status CompletionWriter::Write(shm::Completion completion,
                                     const absl::Status& status,
                                     absl::string_view text) {
  handler_->traffic().CountAnswer(status);
  if (!status.ok()) {
    text = status.message().substr(0, static_cast<size_t>(shm::kTextBytes));
  }
  completion.status = static_cast<uint32_t>(status.code());
  completion.text_bytes = static_cast<uint32_t>(text.size());
  absl::MutexLock lock(&mutex_);
  std::copy(text.begin(), text.end(), segments_->text(producer_.tail()));
  return producer_.Push(completion);
}

void CompletionWriter::OnStepDone(uint64_t request_id,
                                  const absl::Status& status,
                                  const session::StepOutcome& outcome) {
  shm::Completion completion = {};
  completion.request_id = request_id;
  completion.step = outcome.step;
  completion.flags = (outcome.applied ? shm::kCompletionApplied : 0) |
                     (outcome.found_inf ? shm::kCompletionFoundInf : 0) |
                     (outcome.prepared ? shm::kCompletionPrepared : 0) |
                     outcome.hysteresis_left << shm::kCompletionHysteresisShift;
  completion.good_steps = outcome.good_steps;
  completion.gradient_norm = outcome.gradient_norm;
  completion.clip_coefficient = outcome.clip_coefficient;
  completion.update_ns = outcome.prepared ? outcome.digest : outcome.update_ns;
  completion.loss_scale = outcome.loss_scale;
  handler_->LogOutcome(status, outcome);
  handler_->traffic().CountPublished(status, outcome);
  const uint64_t durable_step = outcome.durable_step;
  const absl::string_view text(reinterpret_cast<const char*>(&durable_step),
                               durable_step != 0 ? sizeof(durable_step) : 0);
  const absl::Status written = Write(completion, status, text);
  if (written.ok()) return;
  {
    absl::MutexLock lock(&mutex_);
    error_.Update(written);
    failed_.store(true);
  }
  if (on_failure_ != nullptr) on_failure_();
}

absl::StatusOr<bool> CompletionWriter::HasRoom(uint64_t taken) const {
  const uint64_t head =
      segments_->client_ring()->consumed_head.load(std::memory_order_acquire);
  if (head > taken) {
    return absl::DataLossError(absl::StrCat("the peer has read ", head,
                                            " answers to the ", taken,
                                            " submissions that it made"));
  }
  return taken - head < shm::kRingEntries;
}

absl::Status CompletionWriter::error() const {
  absl::MutexLock lock(&mutex_);
  return error_;
}

}  // namespace optstate::transport
