#ifndef OPTSTATE_SERVER_METRICS_NODE_REPORTS_H_
#define OPTSTATE_SERVER_METRICS_NODE_REPORTS_H_

#include <functional>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "optstate/v1/admin.pb.h"

namespace optstate::metrics {

// Describes the node. The daemon's is its Admin service.
//
// Threads: thread-safe.
class NodeSource {
 public:
  virtual ~NodeSource() = default;

  // Returns status, all jobs, tiers and devices, having asked each engine once.
  // A job whose engine gives no answer by `deadline` has what is known without
  // it.
  // A private job has no name there, see admin/shown_jobs.h.
  virtual v1::NodeReport DescribeNode(absl::Time deadline) = 0;
  // Returns whether everybody may see an event.
  virtual bool IsPublic(const v1::Event& event) = 0;
};

// The latest report of a source, with the node's last events and the time.
// Callers that ask at once share one report, and one that is no older than
// kAgeMax is given again: reading it often costs engines no more.
//
// Threads: thread-safe. Get() blocks.
class NodeReports {
 public:
  static constexpr absl::Duration kAgeMax = absl::Seconds(1);
  // The time that engines have to answer.
  static constexpr absl::Duration kAnswerMax = absl::Seconds(2);
  static constexpr size_t kEventsMax = 200;

  using Clock = std::function<absl::Time()>;
  // `source` outlives the object.
  explicit NodeReports(NodeSource* source, Clock clock = absl::Now)
      : source_(source), clock_(std::move(clock)) {}

  std::shared_ptr<const v1::NodeReport> Get();

 private:
  std::shared_ptr<const v1::NodeReport> Collect() const;

  NodeSource* const source_;
  const Clock clock_;
  absl::Mutex mutex_;
  bool is_collecting_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<const v1::NodeReport> last_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_at_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace optstate::metrics

#endif  // OPTSTATE_SERVER_METRICS_NODE_REPORTS_H_
