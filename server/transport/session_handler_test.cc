#include "server/transport/session_handler.h"

#include <cstdint>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "optstate/v1/session.pb.h"

namespace optstate::transport {
namespace {

TEST(VerdictFromTest, NumbersThatAreNoneStayNone) {
  for (const int number : {-1, 0, 4, 6, 255, 256, 257, 258, 259, INT32_MAX}) {
    v1::DecideRequest request;
    request.set_verdict(static_cast<v1::DecideRequest::Verdict>(number));
    EXPECT_EQ(VerdictFrom(request).verdict, Verdict{0}) << number;
  }
}

TEST(VerdictFromTest, NamesAreThoseOfTheMessage) {
  v1::DecideRequest request;
  request.set_verdict(v1::DecideRequest::VERDICT_COMMIT);
  EXPECT_EQ(VerdictFrom(request).verdict, Verdict::kCommit);
  request.set_verdict(v1::DecideRequest::VERDICT_SKIP);
  EXPECT_EQ(VerdictFrom(request).verdict, Verdict::kSkip);
  request.set_verdict(v1::DecideRequest::VERDICT_ABORT);
  EXPECT_EQ(VerdictFrom(request).verdict, Verdict::kAbort);
}

}  // namespace
}  // namespace optstate::transport
