#include "server/os/tree_remover.h"

#include <optional>
#include <utility>

#include "server/os/private_directory.h"

namespace optstate::os {

TreeRemover::TreeRemover() : thread_([this] { Run(); }) {}

TreeRemover::~TreeRemover() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  thread_.join();
}

void TreeRemover::Remove(std::string path, Done done) {
  Add({[path = std::move(path)] { return RemoveTree(path); }, std::move(done)});
}

void TreeRemover::RemoveAll(std::vector<TreeToRemove> trees,
                            std::shared_ptr<RemovalProgress> progress,
                            Done done) {
  Add({[trees = std::move(trees), progress = std::move(progress)] {
         return RemoveTrees(trees, progress.get());
       },
       std::move(done)});
}

void TreeRemover::Add(Task task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

void TreeRemover::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closing_ || !tasks_.empty();
  };
  while (true) {
    std::optional<Task> task;
    {
      absl::MutexLock lock(&mutex_, absl::Condition(&has_work));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task->done(task->remove());
  }
}

}  // namespace optstate::os
