#include "server/session/tiers/disk_rates.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "storage/block_device/device_format.h"
#include "storage/format/checked_file.h"

namespace optstate::session {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class DiskRatesTest : public testing::Test {
 protected:
  DiskRatesTest() : root_(testing::TempDir() + "/disk-rates-XXXXXX") {
    if (::mkdtemp(root_.data()) == nullptr) std::abort();
    for (const char* disk : {"/0", "/1"}) {
      fs::create_directory(root_ + disk);
      settings_.add_directories(root_ + disk);
    }
  }
  ~DiskRatesTest() override { fs::remove_all(root_); }

  DiskRates Measure(bool anew = false) {
    return MeasureDiskRates(
        root_, settings_, anew,
        [this](const std::string& directory)
            -> absl::StatusOr<v1::DirectoryRates> {
          measured_.push_back(directory.substr(root_.size()));
          seen_ = Recorded();
          if (directory == broken_) return absl::UnavailableError("is broken");
          v1::DirectoryRates rates;
          rates.set_mixed_bytes_per_s(next_);
          return rates;
        });
  }
  std::vector<double> Recorded() const {
    std::vector<double> rates;
    for (const auto& one : RecordedDiskRates(root_, settings_).directories) {
      rates.push_back(one.mixed_bytes_per_s());
    }
    return rates;
  }
  void ChangeRecord(void (*change)(v1::DiskRates*)) const {
    auto file = storage::ReadCheckedFile(root_ + "/disk_rates");
    ASSERT_TRUE(file.ok()) << file.status();
    v1::DiskRates rates;
    ASSERT_TRUE(rates.ParseFromString(file->payload));
    change(&rates);
    file->payload = rates.SerializeAsString();
    ASSERT_TRUE(storage::WriteCheckedFile(root_ + "/disk_rates", *file).ok());
  }

  std::string root_;
  v1::NvmeSettings settings_;
  std::vector<std::string> measured_;
  std::vector<double> seen_;  // recorded when the last one was measured
  std::string broken_;
  double next_ = 7;
};

TEST_F(DiskRatesTest, EachDirectoryIsMeasuredOnce) {
  EXPECT_THAT(Recorded(), ElementsAre(0, 0));
  EXPECT_EQ(Measure().directories[1].mixed_bytes_per_s(), 7);
  next_ = 9;
  EXPECT_EQ(Measure().directories[1].mixed_bytes_per_s(), 7);
  EXPECT_THAT(measured_, ElementsAre("/0", "/1"));
  EXPECT_THAT(Recorded(), ElementsAre(7, 7));
  EXPECT_EQ(Measure(/*anew=*/true).directories[1].mixed_bytes_per_s(), 9);
  EXPECT_THAT(Recorded(), ElementsAre(9, 9));
}

// A look meanwhile shows how many directories are measured, and keeps the
// rates of the others.
TEST_F(DiskRatesTest, EachRateIsRecordedOnceItIsKnown) {
  Measure();
  EXPECT_THAT(seen_, ElementsAre(7, 0));
  next_ = 9;
  Measure(/*anew=*/true);
  EXPECT_THAT(seen_, ElementsAre(9, 7));
}

TEST_F(DiskRatesTest, AnotherBootOrFileSystemIsMeasuredAnew) {
  for (const auto change :
       {+[](v1::DiskRates* rates) { rates->set_boot_id("another"); },
        +[](v1::DiskRates* rates) {
          rates->mutable_directories(0)->set_device(1);
          rates->mutable_directories(1)->set_file_system_bytes(1);
        }}) {
    Measure();
    measured_.clear();
    ChangeRecord(change);
    EXPECT_THAT(Recorded(), ElementsAre(0, 0));
    Measure();
    EXPECT_THAT(measured_, ElementsAre("/0", "/1"));
  }
}

TEST_F(DiskRatesTest, ADamagedRecordCountsAsNone) {
  Measure();
  std::fstream file(root_ + "/disk_rates");
  file.seekp(90);
  file.put('\xff');
  file.close();
  measured_.clear();
  EXPECT_THAT(Recorded(), ElementsAre(0, 0));
  Measure();
  EXPECT_THAT(measured_, ElementsAre("/0", "/1"));
  EXPECT_THAT(Recorded(), ElementsAre(7, 7));
}

TEST_F(DiskRatesTest, ADirectoryThatCannotBeMeasuredIsNotKnown) {
  broken_ = root_ + "/1";
  const DiskRates rates = Measure();
  EXPECT_TRUE(rates.problems[0].ok());
  EXPECT_TRUE(absl::IsUnavailable(rates.problems[1]));
  EXPECT_EQ(rates.directories[1].measured_at_ns(), 0);
  EXPECT_THAT(DirectoryWeights(settings_, rates), IsEmpty());
  // A rate that was measured before stays known.
  broken_ = "";
  Measure();
  broken_ = root_ + "/0";
  next_ = 9;
  EXPECT_TRUE(absl::IsUnavailable(Measure(/*anew=*/true).problems[0]));
  EXPECT_THAT(Recorded(), ElementsAre(7, 9));
}

TEST_F(DiskRatesTest, NothingIsMeasuredWithoutAPlaceForTheRecord) {
  const std::string root = std::exchange(root_, root_ + "/absent");
  const DiskRates rates = Measure();
  root_ = root;
  EXPECT_FALSE(rates.problems[0].ok());
  EXPECT_THAT(measured_, IsEmpty());
}

TEST_F(DiskRatesTest, WeightsAreTheConfigurationsOrThoseOfTheRates) {
  DiskRates rates = Measure();
  EXPECT_THAT(DirectoryWeights(settings_, rates), IsEmpty());
  rates.directories[0].set_mixed_bytes_per_s(21);
  EXPECT_THAT(DirectoryWeights(settings_, rates), ElementsAre(3, 1));
  settings_.add_directory_weights(2);
  settings_.add_directory_weights(4);
  EXPECT_THAT(DirectoryWeights(settings_, rates), ElementsAre(1, 2));
}

TEST_F(DiskRatesTest, ARealDirectoryIsMeasured) {
  v1::DaemonConfig config;
  *config.mutable_nvme() = settings_;
  config.mutable_engine()->set_subgroup_elements(4096);
  const DiskRates rates = MeasureDiskRates(root_, config, /*anew=*/false);
  for (const v1::DirectoryRates& one : rates.directories) {
    EXPECT_GT(one.read_bytes_per_s(), 0);
    EXPECT_GT(one.write_bytes_per_s(), 0);
    EXPECT_GT(one.mixed_bytes_per_s(), 0);
    EXPECT_NE(one.io_engine(), "");
  }
}

// A file stands for the device.
TEST_F(DiskRatesTest, ADeviceIsMeasuredInPlaceOfItsDirectorysFileSystem) {
  const std::string device = root_ + "/device";
  std::ofstream(device) << "";
  fs::resize_file(device, 16 << 20);
  fs::create_directory(root_ + "/0/jobs");
  const auto formatted = storage::FormatDevice(root_ + "/0", device, false);
  ASSERT_TRUE(formatted.ok()) << formatted.status();
  v1::DaemonConfig config;
  *config.mutable_nvme() = settings_;
  config.mutable_engine()->set_subgroup_elements(4096);
  MeasureDiskRates(root_, config, /*anew=*/false);
  v1::NvmeDirectory* const named =
      config.mutable_nvme()->add_directory_settings();
  named->set_path(root_ + "/0");
  named->set_device(device);
  // The rates of the file system are not those of the device.
  EXPECT_EQ(
      RecordedDiskRates(root_, config.nvme()).directories[0].measured_at_ns(),
      0);
  const DiskRates rates = MeasureDiskRates(root_, config, /*anew=*/false);
  EXPECT_TRUE(rates.problems[0].ok()) << rates.problems[0];
  EXPECT_GT(rates.directories[0].mixed_bytes_per_s(), 0);
  EXPECT_EQ(rates.directories[0].device_id(), formatted->device_id);
  EXPECT_EQ(RecordedDiskRates(root_, config.nvme())
                .directories[0]
                .mixed_bytes_per_s(),
            rates.directories[0].mixed_bytes_per_s());
  EXPECT_TRUE(fs::is_empty(root_ + "/0/jobs"));
}

}  // namespace
}  // namespace optstate::session
