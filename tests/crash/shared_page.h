#ifndef OPTSTATE_TESTS_CRASH_SHARED_PAGE_H_
#define OPTSTATE_TESTS_CRASH_SHARED_PAGE_H_

#include <string>

#include "absl/status/statusor.h"

namespace optstate::crash {

// The first 4,096 bytes of a file, mapped shared until it is destroyed.
class SharedPage {
 public:
  enum class Access { kRead, kCreate };

  static absl::StatusOr<SharedPage> Map(const std::string& path, Access access);
  SharedPage(SharedPage&& other) noexcept;
  SharedPage& operator=(SharedPage&& other) noexcept;
  ~SharedPage();

  void* data() const { return data_; }

 private:
  explicit SharedPage(void* data) : data_(data) {}

  void* data_ = nullptr;
};

}  // namespace optstate::crash

#endif  // OPTSTATE_TESTS_CRASH_SHARED_PAGE_H_
