#ifndef OPTSTATE_SERVER_ADMIN_CALL_COUNTER_H_
#define OPTSTATE_SERVER_ADMIN_CALL_COUNTER_H_

#include <grpcpp/support/server_interceptor.h>

#include <memory>

namespace optstate::admin {

// Makes an interceptor that counts the answers to Admin's calls by their code,
// in observe/counters.h. Other services' calls, as health checks, are not
// counted.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
MakeCallCounter();

}  // namespace optstate::admin

#endif  // OPTSTATE_SERVER_ADMIN_CALL_COUNTER_H_
