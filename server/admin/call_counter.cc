#include "server/admin/call_counter.h"

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "server/observe/counters.h"

namespace optstate::admin {
namespace {

namespace experimental = grpc::experimental;

class CountedCall final : public experimental::Interceptor {
 public:
  void Intercept(experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      const auto code = methods->GetSendStatus().error_code();
      // Both libraries have the same numbers.
      observe::Count(observe::Answered::kAdminCall,
                     static_cast<absl::StatusCode>(code));
    }
    methods->Proceed();
  }
};

class Factory final : public experimental::ServerInterceptorFactoryInterface {
 public:
  experimental::Interceptor* CreateServerInterceptor(
      experimental::ServerRpcInfo* info) override {
    const absl::string_view method = info->method();
    // null: no interceptor for this call.
    return absl::StartsWith(method, "/optstate.v1.Admin/") ? new CountedCall
                                                           : nullptr;
  }
};

}  // namespace

std::unique_ptr<experimental::ServerInterceptorFactoryInterface>
MakeCallCounter() {
  return std::make_unique<Factory>();
}

}  // namespace optstate::admin
