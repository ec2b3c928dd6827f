#ifndef OPTSTATE_SERVER_SESSION_TESTING_RECORDING_LISTENER_H_
#define OPTSTATE_SERVER_SESSION_TESTING_RECORDING_LISTENER_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "server/session/job_types.h"

namespace optstate::session {

// Records the answers to a rank, by request, and the notices. A request that is
// answered twice stops the test.
class RecordingListener final : public SessionListener {
 public:
  struct Answer {
    absl::Status status;
    StepOutcome outcome;
  };
  void OnStepDone(uint64_t request_id, const absl::Status& status,
                  const StepOutcome& outcome) override {
    const std::lock_guard<std::mutex> lock(mu_);
    if (answers_.emplace(request_id, Answer{status, outcome}).second) return;
    std::fprintf(stderr, "request %llu is answered again: %s\n",
                 static_cast<unsigned long long>(request_id),
                 status.ToString().c_str());
    std::abort();
  }
  void OnNotice(absl::string_view text) override {
    const std::lock_guard<std::mutex> lock(mu_);
    notices_.emplace_back(text);
  }
  std::vector<std::string> notices() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return notices_;
  }
  // Returns null while the request is not answered.
  const Answer* Find(uint64_t request_id) const {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto it = answers_.find(request_id);
    return it == answers_.end() ? nullptr : &it->second;
  }
  size_t answer_count() const {
    const std::lock_guard<std::mutex> lock(mu_);
    return answers_.size();
  }

 private:
  mutable std::mutex mu_;
  std::map<uint64_t, Answer> answers_;
  std::vector<std::string> notices_;
};

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_RECORDING_LISTENER_H_
