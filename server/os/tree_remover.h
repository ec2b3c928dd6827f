#ifndef OPTSTATE_SERVER_OS_TREE_REMOVER_H_
#define OPTSTATE_SERVER_OS_TREE_REMOVER_H_

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace optstate::os {

// Removes directory trees on a thread of its own: freeing the memory of a large
// job takes seconds.
//
// Threads: thread-safe. Destruction finishes the requested removals.
class TreeRemover {
 public:
  TreeRemover();
  ~TreeRemover();

  // Removes `path`; `done` runs on the remover's thread.
  void Remove(std::string path, std::function<void(absl::Status)> done);

 private:
  struct Task {
    std::string path;
    std::function<void(absl::Status)> done;
  };

  void Run();

  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_TREE_REMOVER_H_
