#ifndef OPTSTATE_SERVER_OS_TREE_REMOVER_H_
#define OPTSTATE_SERVER_OS_TREE_REMOVER_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/observe/counters.h"
#include "server/os/tree_removal.h"

namespace optstate::os {

// Removes directory trees on a thread of its own: freeing the memory of a large
// job takes seconds.
//
// Threads: thread-safe. Destruction finishes the requested removals.
class TreeRemover {
 public:
  TreeRemover();
  ~TreeRemover();

  using Done = std::function<void(absl::Status)>;
  // Removes `path`; `done` runs on the remover's thread.
  void Remove(std::string path, Done done);
  // Removes all of `trees`, as RemoveTrees() does, which tells `progress`.
  void RemoveAll(std::vector<TreeToRemove> trees,
                 std::shared_ptr<RemovalProgress> progress, Done done);

 private:
  struct Task {
    std::function<absl::Status()> remove;
    Done done;
    observe::InQueue in_queue{observe::Queue::kRemoval};
  };

  void Add(Task task);
  void Run();

  absl::Mutex mutex_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace optstate::os

#endif  // OPTSTATE_SERVER_OS_TREE_REMOVER_H_
