#include "server/os/tree_remover.h"

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

void TreeRemover::Remove(std::string path,
                         std::function<void(absl::Status)> done) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back({std::move(path), std::move(done)});
}

void TreeRemover::Run() {
  const auto has_work = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return closing_ || !tasks_.empty();
  };
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_, absl::Condition(&has_work));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task.done(RemoveTree(task.path));
  }
}

}  // namespace optstate::os
