#include "server/session/job_description.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "optstate/v1/session.pb.h"
#include "proto/types/layout.h"

namespace optstate::session {
namespace {

// Returns a description as a build without the limit wrote it.
std::string DescriptionOfGroups(size_t groups) {
  v1::RegisterRequest request;
  v1::Layout& layout = *request.mutable_layout();
  layout.set_optimizer(v1::OPTIMIZER_KIND_ADAMW);
  for (size_t i = 0; i < groups; ++i) layout.add_groups();
  v1::Parameter& parameter = *layout.add_parameters();
  parameter.set_name("p");
  parameter.add_shape(3);
  parameter.set_numel(3);
  parameter.set_dtype(v1::DTYPE_FLOAT32);
  parameter.set_gradient_dtype(v1::DTYPE_FLOAT32);
  request.set_world_size(1);
  request.set_local_world_size(1);
  request.set_partition(v1::PARTITION_MODE_GREEDY);
  return request.SerializeAsString();
}

TEST(JobDescriptionTest, TheMostGroupsAreRead) {
  const auto read = ParseDescription(DescriptionOfGroups(kGroupsMax));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->layout.groups().size(), kGroupsMax);
}

// Nothing is lost or damaged, and the text says what is left to do.
TEST(JobDescriptionTest, MoreGroupsAreRefusedWithWhatToDo) {
  const absl::Status refused =
      ParseDescription(DescriptionOfGroups(kGroupsMax + 1)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  for (const std::string& text :
       {absl::StrCat(kGroupsMax + 1, " param groups"),
        std::string("left as they are"), std::string("delete the job"),
        std::string("in one group")}) {
    EXPECT_TRUE(absl::StrContains(refused.message(), text)) << refused;
  }
}

}  // namespace
}  // namespace optstate::session
