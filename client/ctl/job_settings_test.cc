#include "client/ctl/job_settings.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace optstate::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::SetJobRequest Parsed(const std::vector<std::string>& words) {
  const auto request = ParseJobSettings("gpt", words);
  EXPECT_TRUE(request.ok()) << request.status();
  return request.value_or(v1::SetJobRequest());
}

std::string ErrorOf(const std::string& word) {
  const absl::Status status = ParseJobSettings("gpt", {word}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << word;
  return std::string(status.message());
}

TEST(JobSettingsTest, BytesHaveUnits) {
  for (const auto& [text, bytes] :
       std::vector<std::pair<std::string, uint64_t>>{
           {"1", 1},
           {"4096B", 4096},
           {"64MiB", 64 << 20},
           {"64 mib", 64 << 20},
           {"1.5GiB", 1610612736},
           {"2TiB", uint64_t{2} << 40}}) {
    EXPECT_EQ(Parsed({absl::StrCat("host_budget=", text)}).host_budget_bytes(),
              bytes)
        << text;
  }
  for (const char* text : {"", "0", "0.1", "-1", "8GB", "GiB", "1.2.3MiB",
                           "nan", "8GiB ish", "9999999TiB"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("host_budget=", text)),
                HasSubstr("such as 64MiB"))
        << text;
  }
}

TEST(JobSettingsTest, DurabilityIsWrittenAsInAScript) {
  EXPECT_EQ(Parsed({"durability=step"}).durability(), v1::DURABILITY_KIND_STEP);
  EXPECT_EQ(Parsed({"durability=none"}).durability(), v1::DURABILITY_KIND_NONE);
  const v1::SetJobRequest every = Parsed({"durability=every 50"});
  EXPECT_EQ(every.durability(), v1::DURABILITY_KIND_EVERY);
  EXPECT_EQ(every.every_steps(), 50);
  for (const auto& [text, ms] : std::vector<std::pair<std::string, uint32_t>>{
           {"30s", 30000}, {"30", 30000}, {"1 min", 60000}, {"250ms", 250}}) {
    const v1::SetJobRequest interval =
        Parsed({absl::StrCat("durability=interval ", text)});
    EXPECT_EQ(interval.durability(), v1::DURABILITY_KIND_INTERVAL);
    EXPECT_EQ(interval.interval_ms(), ms) << text;
  }
  for (const char* text :
       {"", "always", "step 3", "every", "every 0", "every 5s", "interval",
        "interval 0s", "interval 3 weeks"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("durability=", text)),
                HasSubstr("\"every 50\""))
        << text;
  }
}

TEST(JobSettingsTest, WeightsAreAListOrAuto) {
  EXPECT_THAT(Parsed({"directory_weights=3,1,0"}).directory_weights(),
              ElementsAre(3, 1, 0));
  EXPECT_THAT(Parsed({"directory_weights=7"}).directory_weights(),
              ElementsAre(7));
  EXPECT_TRUE(Parsed({"directory_weights=auto"}).directory_weights_auto());
  for (const char* text : {"", "3,", "1,-1", "1;2", "0.5,0.5", "4294967296"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("directory_weights=", text)),
                HasSubstr("such as 3,1"))
        << text;
  }
}

TEST(JobSettingsTest, ADeviceBudgetMayBeNone) {
  EXPECT_FALSE(Parsed({"offload_fraction=0.5"}).has_device_budget_bytes());
  EXPECT_EQ(Parsed({"device_budget=8GiB"}).device_budget_bytes(),
            uint64_t{8} << 30);
  const v1::SetJobRequest none = Parsed({"device_budget=0"});
  EXPECT_TRUE(none.has_device_budget_bytes());
  EXPECT_EQ(none.device_budget_bytes(), 0u);
  for (const char* text : {"", "-1", "0.1", "8GB", "plenty"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("device_budget=", text)),
                HasSubstr("such as 64MiB"))
        << text;
  }
  EXPECT_THAT(ErrorOf("budget=1"), HasSubstr("device_budget=BYTES"));
}

TEST(JobSettingsTest, SeveralAreSetAtOnceAndOthersAreNamed) {
  const v1::SetJobRequest request =
      Parsed({"host_budget=8GiB", "durability=step"});
  EXPECT_EQ(request.name(), "gpt");
  EXPECT_EQ(request.host_budget_bytes(), uint64_t{8} << 30);
  EXPECT_EQ(request.durability(), v1::DURABILITY_KIND_STEP);
  for (const char* word : {"budget=1", "host_budget", "=", "8GiB"}) {
    const std::string error = ErrorOf(word);
    EXPECT_THAT(error, HasSubstr("host_budget")) << word;
  }
}

TEST(JobSettingsTest, TheAnswerSaysWhatIsInForce) {
  v1::SetJobReply reply;
  reply.mutable_storage()->set_placement(v1::PLACEMENT_NVME);
  reply.mutable_storage()->set_host_budget_bytes(8 << 20);
  reply.mutable_storage()->set_durability(v1::DURABILITY_KIND_EVERY);
  reply.mutable_storage()->set_every_steps(5);
  reply.set_records(40);
  reply.set_frames(4);
  reply.set_frame_bytes(2 << 20);
  EXPECT_EQ(JobSettingsText(reply),
            "host_budget 8.0 MiB, which is 4 of 40 records of up to 2.0 MiB in "
            "memory at once; durability: every 5 steps");
  reply.mutable_storage()->set_placement(v1::PLACEMENT_HOST);
  EXPECT_EQ(JobSettingsText(reply), "durability: every 5 steps");
  reply.mutable_storage()->set_directories(2);
  EXPECT_EQ(JobSettingsText(reply),
            "durability: every 5 steps; 2 directories, in equal parts");
  reply.set_moved_bytes(3 << 20);
  reply.set_moved_ms(1250);
  reply.mutable_storage()->add_directory_weights(3);
  reply.mutable_storage()->add_directory_weights(1);
  EXPECT_EQ(JobSettingsText(reply),
            "durability: every 5 steps; 2 directories, by weights 3,1: 3.0 MiB "
            "written anew, for which training waited 1.2 s");
  reply.mutable_storage()->set_directories(1);
  EXPECT_EQ(
      JobSettingsText(reply),
      "durability: every 5 steps; 1 directory: 3.0 MiB written anew, for which "
      "training waited 1.2 s");
}

TEST(JobSettingsTest, TheAnswerSaysWhatStaysOnDevices) {
  v1::SetJobReply reply;
  reply.mutable_storage()->set_offload_fraction(0);
  reply.mutable_storage()->set_device_budget_bytes(8 << 20);
  EXPECT_EQ(JobSettingsText(reply),
            "durability: none; 0% of elements updated by the CPU, 100% by "
            "devices; device_budget 8.0 MiB of each device, where records "
            "stay");
  EXPECT_EQ(ResidentText(12'300'000, 147 << 20), "12.3M elements, 147.0 MiB");
}

}  // namespace
}  // namespace optstate::ctl
