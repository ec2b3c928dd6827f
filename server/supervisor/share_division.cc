#include "server/supervisor/share_division.h"

namespace optstate::supervisor {

std::map<std::string, double> DivideByOwners(
    const std::map<std::string, WeighedJob>& jobs,
    const std::function<uint32_t(uid_t)>& weight_of) {
  struct Owner {
    double weight = 0;
    double job_weights = 0;
  };
  std::map<uid_t, Owner> owners;
  double owner_weights = 0;
  double job_weights = 0;
  for (const auto& [name, job] : jobs) {
    const auto [found, is_new] = owners.try_emplace(job.owner);
    if (is_new) {
      found->second.weight = weight_of(job.owner);
      owner_weights += found->second.weight;
    }
    found->second.job_weights += job.weight;
    job_weights += job.weight;
  }
  std::map<std::string, double> divided;
  for (const auto& [name, job] : jobs) {
    const Owner& owner = owners.at(job.owner);
    divided[name] = job_weights * (owner.weight / owner_weights) *
                    (job.weight / owner.job_weights);
  }
  return divided;
}

}  // namespace optstate::supervisor
