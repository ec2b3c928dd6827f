// Tests the extents of a device, for which a file stands.

#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "storage/io/io_engine_suite.h"

namespace optstate::io {
namespace {

constexpr uint64_t kDeviceBytes = 32 * kSectorBytes;
constexpr Extent kFirst = {.begin_bytes = 4 * kSectorBytes,
                           .bytes = 8 * kSectorBytes};
constexpr Extent kSecond = {.begin_bytes = 12 * kSectorBytes,
                            .bytes = 8 * kSectorBytes};

TEST_P(IoEngineSuite, OffsetsAreThoseOfTheDevice) {
  engine().Close(Create("device", kDeviceBytes));
  const FileId first = OpenExtent(engine(), kFirst);
  const FileId second = OpenExtent(engine(), kSecond);
  IoBuffer bytes(kFirst.bytes);
  for (const auto& [file, extent] :
       {std::pair(first, kFirst), std::pair(second, kSecond)}) {
    bytes.Fill(extent.begin_bytes);
    EXPECT_EQ(Run(Write(file, extent.begin_bytes, bytes)), absl::OkStatus());
    EXPECT_EQ(Run(Sync(file)), absl::OkStatus());
  }
  engine().Close(first);
  engine().Close(second);
  const FileId all = Open("device", kDeviceBytes);
  for (const Extent& extent : {kFirst, kSecond}) {
    IoBuffer expected(extent.bytes);
    expected.Fill(extent.begin_bytes);
    EXPECT_EQ(Run(Read(all, extent.begin_bytes, bytes)), absl::OkStatus());
    EXPECT_TRUE(bytes == expected);
  }
}

TEST_P(IoEngineSuite, EnginesShareADeviceButNoExtent) {
  engine().Close(Create("device", kDeviceBytes));
  const FileId own = OpenExtent(engine(), kFirst);
  auto other = Make({});
  ASSERT_NE(other, nullptr);
  OpenExtent(*other, kSecond);
  for (const uint64_t begin : {0, 4, 8, 11}) {
    const absl::Status status =
        other
            ->OpenExtent(Path("device"), {.begin_bytes = begin * kSectorBytes,
                                          .bytes = 5 * kSectorBytes})
            .status();
    EXPECT_TRUE(absl::IsUnavailable(status)) << begin << ": " << status;
  }
  engine().Close(own);
  OpenExtent(*other, kFirst);
  other = nullptr;
  OpenExtent(engine(), kFirst);
  OpenExtent(engine(), kSecond);
}

TEST_P(IoEngineSuite, ADeviceThatIsNotThereOrTooShort) {
  engine().Close(Create("device", kDeviceBytes));
  EXPECT_TRUE(
      absl::IsNotFound(engine().OpenExtent(Path("none"), kFirst).status()));
  const absl::Status shrunk =
      engine()
          .OpenExtent(Path("device"), {.begin_bytes = 30 * kSectorBytes,
                                       .bytes = 4 * kSectorBytes})
          .status();
  EXPECT_TRUE(absl::IsDataLoss(shrunk)) << shrunk;
}

TEST_P(IoEngineSuite, AnErrorNamesTheDeviceAndItsOffset) {
  engine().Close(Create("device", kDeviceBytes));
  const FileId file = OpenExtent(engine(), kFirst);
  const IoBuffer bytes(kFirst.bytes);
  world().Truncate(Path("device"), kFirst.begin_bytes);
  const absl::Status status = Run(Read(file, kFirst.begin_bytes, bytes));
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::HasSubstr("at 16384 of " + Path("device")));
}

TEST_P(IoEngineSuite, AWriteOutsideTheExtentStopsTheProcess) {
  engine().Close(Create("device", kDeviceBytes));
  const FileId file = OpenExtent(engine(), kFirst);
  const IoBuffer bytes(2 * kSectorBytes);
  for (const uint64_t sector : {0, 3, 11, 12}) {
    IoRequest request = Write(file, sector * kSectorBytes, bytes);
    EXPECT_DEATH(engine().Submit(&request), "past the end") << sector;
  }
}

}  // namespace
}  // namespace optstate::io
