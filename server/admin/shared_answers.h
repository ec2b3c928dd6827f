#ifndef OPTSTATE_SERVER_ADMIN_SHARED_ANSWERS_H_
#define OPTSTATE_SERVER_ADMIN_SHARED_ANSWERS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/synchronization/mutex.h"

namespace optstate::admin {

// Lets callers who want to know the same at once share one question to the
// engines: each costs calls to engines, and these their locks.
//
// A caller who comes while a question is under way waits for the next one,
// which one of those who wait asks for all of them. So nobody gets an answer
// that is older than his call, and there is one question of a kind at a time.
// Nothing is kept when nobody waits for it.
//
// Threads: thread-safe. Calls block the calling thread.
template <typename Answer>
class SharedAnswers {
 public:
  // Returns what `ask`, or that of another caller with this key, has found
  // since the call began.
  std::shared_ptr<const Answer> Get(const std::string& key,
                                    absl::FunctionRef<Answer()> ask) {
    const std::shared_ptr<Question> question = Join(key);
    std::shared_ptr<const Answer> answer = question->Get(ask);
    Leave(key, question.get());
    return answer;
  }

  // The number of callers with this key who wait for a question that has not
  // begun, or that another asks.
  size_t CountWaiting(const std::string& key) const {
    absl::MutexLock lock(&mutex_);
    const auto found = questions_.find(key);
    return found == questions_.end() ? 0 : found->second->waiting();
  }
  // The number of keys whose callers are here.
  size_t size() const {
    absl::MutexLock lock(&mutex_);
    return questions_.size();
  }

 private:
  // The questions of one kind, one after the other.
  class Question {
   public:
    std::shared_ptr<const Answer> Get(absl::FunctionRef<Answer()> ask) {
      {
        absl::MutexLock lock(&mutex_);
        // The first question that begins after this call.
        const uint64_t wanted = begun_ + 1;
        const auto is_ready = [this, wanted]()
                                  ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
                                    return ended_ >= wanted || begun_ == ended_;
                                  };
        ++waiting_;
        mutex_.Await(absl::Condition(&is_ready));
        --waiting_;
        if (ended_ >= wanted) {
          return waiting_ == 0 ? std::exchange(last_, nullptr) : last_;
        }
        ++begun_;
      }
      auto answer = std::make_shared<const Answer>(ask());
      absl::MutexLock lock(&mutex_);
      ended_ = begun_;
      if (waiting_ != 0) last_ = answer;
      return answer;
    }

    size_t waiting() const {
      absl::MutexLock lock(&mutex_);
      return waiting_;
    }

    size_t callers = 0;  // guarded by the mutex of the map

   private:
    mutable absl::Mutex mutex_;
    // Questions that have begun, and that have ended: at most one fewer.
    uint64_t begun_ ABSL_GUARDED_BY(mutex_) = 0;
    uint64_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
    size_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
    // The answer to the last one, as long as somebody waits for it.
    std::shared_ptr<const Answer> last_ ABSL_GUARDED_BY(mutex_);
  };

  std::shared_ptr<Question> Join(const std::string& key) {
    absl::MutexLock lock(&mutex_);
    std::shared_ptr<Question>& question = questions_[key];
    if (question == nullptr) question = std::make_shared<Question>();
    ++question->callers;
    return question;
  }

  // No question is under way when the last caller leaves, so that the next one
  // begins anew.
  void Leave(const std::string& key, Question* question) {
    absl::MutexLock lock(&mutex_);
    if (--question->callers == 0) questions_.erase(key);
  }

  mutable absl::Mutex mutex_;
  // Questions with callers: no more than there are callers at a time.
  std::map<std::string, std::shared_ptr<Question>> questions_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_SHARED_ANSWERS_H_
