// Tests what a frame takes of a budget, by dtype and durability, and jobs whose
// records have sections that are not used any more.

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "proto/types/random_layout.h"
#include "storage/io/io_engine.h"
#include "storage/io/simulated_disk.h"
#include "storage/io/simulated_io_engine.h"
#include "storage/tiers/nvme/frame_table.h"
#include "storage/tiers/nvme/nvme_store.h"
#include "storage/tiers/nvme/nvme_test_job.h"
#include "storage/tiers/nvme/record_files.h"
#include "storage/tiers/nvme/record_layout.h"

namespace optstate::nvme {
namespace {

constexpr uint64_t kRecordCount = 10;
constexpr uint64_t kElements = kTileElements;  // of a record

Layout LayoutOf(DType dtype, MasterFormat master = MasterFormat::kFloat32,
                StateFormat state = StateFormat::kFloat32) {
  ParameterSpec parameter;
  parameter.name = "a";
  parameter.numel = static_cast<int64_t>(kRecordCount * kElements);
  parameter.shape = {parameter.numel};
  parameter.dtype = dtype;
  LayoutSpec spec;
  spec.groups.resize(1);
  spec.parameters = {parameter};
  spec.master_format = master;
  spec.state_format = state;
  return *Layout::Make(std::move(spec));
}

// The bytes of a frame of AdamW, by what the job is.
struct FrameCase {
  const char* name;
  DType dtype;
  MasterFormat master;
  StateFormat state;
  uint64_t plain;    // durability none
  uint64_t durable;  // the parameters that are a part of their masters too
  uint64_t on_disk;  // all parameters too
};

const FrameCase kFrameCases[] = {
    {"float32", DType::kFloat32, MasterFormat::kFloat32, StateFormat::kFloat32,
     8 * kElements, 12 * kElements, 12 * kElements},
    {"bfloat16", DType::kBFloat16, MasterFormat::kFloat32,
     StateFormat::kFloat32, 12 * kElements, 12 * kElements, 14 * kElements},
    {"float16", DType::kFloat16, MasterFormat::kFloat32, StateFormat::kFloat32,
     12 * kElements, 12 * kElements, 14 * kElements},
    {"split", DType::kBFloat16, MasterFormat::kSplit, StateFormat::kFloat32,
     10 * kElements, 12 * kElements, 12 * kElements},
    {"bfloat16 state", DType::kFloat32, MasterFormat::kFloat32,
     StateFormat::kBFloat16, 4 * kElements, 8 * kElements, 8 * kElements},
    // Codes and scales, 8,320 bytes, fill three sectors.
    {"8-bit state", DType::kFloat32, MasterFormat::kFloat32,
     StateFormat::kDynamic8, 12288, 12288 + 4 * kElements,
     12288 + 4 * kElements},
};

uint64_t FrameOf(const FrameCase& of, bool is_durable, bool holds_parameters,
                 bool has_sections = false) {
  return NvmeStore::SizesOf(LayoutOf(of.dtype, of.master, of.state), kElements,
                            {.is_durable = is_durable,
                             .holds_parameters = holds_parameters,
                             .has_sections = has_sections})
      .frame;
}

TEST(NvmeFrameBytesTest, AFrameHasWhatIsUsedOfIt) {
  for (const FrameCase& of : kFrameCases) {
    SCOPED_TRACE(of.name);
    EXPECT_EQ(FrameOf(of, false, false), of.plain);
    EXPECT_EQ(FrameOf(of, true, false), of.durable);
    EXPECT_EQ(FrameOf(of, false, true), of.on_disk);
    EXPECT_EQ(FrameOf(of, true, true), of.on_disk);
    // A job of a former build has what a durable one has.
    EXPECT_EQ(FrameOf(of, false, false, /*has_sections=*/true), of.durable);
  }
}

// A slot has the bytes of a frame, so the disk has no third for nothing either.
TEST(NvmeFrameBytesTest, ASlotHasWhatIsUsedOfIt) {
  for (const FrameCase& of : kFrameCases) {
    SCOPED_TRACE(of.name);
    const Layout layout = LayoutOf(of.dtype, of.master, of.state);
    EXPECT_EQ(NvmeStore::SizesOf(layout, kElements, {}).records_by_directory,
              (std::vector<uint64_t>{kRecordCount * of.plain}));
    EXPECT_EQ(NvmeStore::SizesOf(layout, kElements, {.is_durable = true})
                  .records_by_directory,
              (std::vector<uint64_t>{2 * kRecordCount * of.durable}));
  }
}

class NvmeSectionsTest : public testing::Test {
 protected:
  NvmeSectionsTest() : random_(layouts_.Uniform(0, UINT32_MAX)) {}

  NvmeTestJob::Setup SetupOf(bool has_sections) {
    NvmeTestJob::Setup setup;
    setup.layout = LayoutOf(DType::kFloat32);
    setup.sub_group_elements = kElements;
    setup.is_durable = false;
    setup.has_sections = has_sections;
    setup.directories = {"/disk", "/disk2"};
    setup.make_engine = [this] { return io::MakeSimulatedIoEngine(&disk_); };
    return setup;
  }
  // Makes a job as a former build did: nothing is written yet.
  void MakeFormerJob() {
    job_ = std::make_unique<NvmeTestJob>(SetupOf(/*has_sections=*/true));
    const SubGroupTable sub_groups(&job_->layout(), kElements,
                                   SubGroupTable::CutOf(job_->layout()));
    const RecordLayout records(&job_->layout(), &sub_groups,
                               RecordSection::kMasters);
    ASSERT_EQ(job_->sizes().frame, records.frame_bytes());
    const auto engine = io::MakeSimulatedIoEngine(&disk_);
    RecordFiles::Shape files;
    files.directories = job_->setup().directories;
    files.records = kRecordCount;
    const auto made = RecordFiles::Create(engine.get(), records, files);
    ASSERT_TRUE(made.ok()) << made.status();
    made->Close(engine.get());
    FrameTable::Shape table;
    table.incarnation = NvmeTestJob::kIncarnation;
    table.records = kRecordCount;
    table.checksums = records.checksum_count();
    table.frames = NvmeStore::kFramesMin;
    table.frame_bytes = records.frame_bytes();
    table.paths = 2;
    FrameTable(job_->table().span()).Make(table);
  }
  uint32_t TableVersion() {
    uint32_t version;
    std::memcpy(&version, job_->table().span().data() + 8, sizeof(version));
    return version;
  }
  void WriteAll() {
    for (size_t i = 0; i < kRecordCount; ++i) {
      ASSERT_EQ(job_->Write(i, &random_), absl::OkStatus());
    }
  }
  // The job has all its bytes, with any number of frames, opened again, and
  // with its records written anew.
  void ExpectItGoesOn() {
    const uint64_t frame = job_->sizes().frame;
    for (const uint64_t frames : {uint64_t{7}, NvmeStore::kFramesMin}) {
      ASSERT_EQ(job_->ChangeFrames(frames), absl::OkStatus());
      ASSERT_NO_FATAL_FAILURE(WriteAll());
      ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
      job_->Close();
      ASSERT_EQ(job_->Open(), absl::OkStatus());
      EXPECT_EQ(job_->frames().span().size(), frames * frame);
      ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    }
    const uint32_t version = TableVersion();
    ASSERT_EQ(job_->Rearrange({"/disk", "/disk2"}, {2, 1}), absl::OkStatus());
    EXPECT_EQ(job_->sizes().frame, frame);
    EXPECT_EQ(TableVersion(), version + 1) << "with weights";
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
    job_->Close();
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    ASSERT_EQ(job_->CompareAll(), absl::OkStatus());
  }

  RandomLayouts layouts_;
  std::mt19937_64 random_;
  io::SimulatedDisk disk_{{.seed = layouts_.Uniform(0, UINT32_MAX),
                           .latency_us_max = 200,
                           .folders = {"/disk", "/disk2"}}};
  std::unique_ptr<NvmeTestJob> job_;
};

TEST_F(NvmeSectionsTest, ANewJobHasNone) {
  job_ = std::make_unique<NvmeTestJob>(SetupOf(/*has_sections=*/false));
  EXPECT_EQ(job_->sizes().frame, 8 * kElements);
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(TableVersion(), 3u);
  EXPECT_FALSE(FrameTable::HasSections(job_->table().span()));
  ASSERT_NO_FATAL_FAILURE(WriteAll());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

TEST_F(NvmeSectionsTest, AJobOfAFormerBuildKeepsThem) {
  ASSERT_NO_FATAL_FAILURE(MakeFormerJob());
  EXPECT_EQ(job_->sizes().frame, 12 * kElements);
  ASSERT_EQ(job_->Open(), absl::OkStatus());
  EXPECT_EQ(TableVersion(), 1u);
  EXPECT_TRUE(FrameTable::HasSections(job_->table().span()));
  ASSERT_NO_FATAL_FAILURE(WriteAll());
  ASSERT_NO_FATAL_FAILURE(ExpectItGoesOn());
}

// Tables of jobs that have nothing to leave out are of the first version, which
// former builds open.
TEST_F(NvmeSectionsTest, OnlyTablesOfRecordsThatLackOneSaySo) {
  for (const bool is_durable : {false, true}) {
    NvmeTestJob::Setup setup = SetupOf(/*has_sections=*/false);
    setup.layout = LayoutOf(is_durable ? DType::kFloat32 : DType::kBFloat16);
    setup.is_durable = is_durable;
    job_ = std::make_unique<NvmeTestJob>(std::move(setup));
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    EXPECT_EQ(TableVersion(), 1u);
  }
}

// A table is not read as one of another form, whichever byte of it is damaged.
TEST_F(NvmeSectionsTest, DamageOfTheTableIsNoticed) {
  for (const bool is_former : {false, true}) {
    job_ = nullptr;
    if (is_former) {
      ASSERT_NO_FATAL_FAILURE(MakeFormerJob());
    } else {
      job_ = std::make_unique<NvmeTestJob>(SetupOf(/*has_sections=*/false));
    }
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    ASSERT_NO_FATAL_FAILURE(WriteAll());
    job_->Close();
    const absl::Span<std::byte> table = job_->table().span();
    for (uint64_t at = 0; at < 64 + 8 * kRecordCount; ++at) {
      if (at >= 56 && at < 64) continue;  // frames and is_syncing are set anew
      for (int bit = 0; bit < 8; ++bit) {
        table[at] ^= static_cast<std::byte>(1 << bit);
        const absl::Status damaged = job_->Open();
        EXPECT_TRUE(absl::IsDataLoss(damaged)) << at << ": " << damaged;
        EXPECT_NE(damaged.message().find("frame_table"), std::string::npos);
        table[at] ^= static_cast<std::byte>(1 << bit);
      }
    }
    ASSERT_EQ(job_->Open(), absl::OkStatus());
    EXPECT_EQ(job_->CompareAll(), absl::OkStatus());
    job_ = nullptr;
    disk_.LoseFile("/disk/records");
    disk_.LoseFile("/disk2/records");
  }
}

}  // namespace
}  // namespace optstate::nvme
