#include "storage/io/io_engine_suite.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <utility>

namespace optstate::io {

std::string IoEngineWorldName(
    const testing::TestParamInfo<IoEngineWorldParam>& info) {
  return info.param.name;
}

void IoBuffer::Fill(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint64_t i = 0; i < bytes_; i += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(data_.get() + i, &value, sizeof(value));
  }
}

void IoEngineSuite::SetUp() {
  world_ = GetParam().make();
  auto engine = world_->Make({});
  if (!engine.ok()) GTEST_SKIP() << engine.status();
  engine_ = *std::move(engine);
}

std::unique_ptr<IoEngine> IoEngineSuite::Make(
    const IoEngineWorld::Setup& setup) {
  auto engine = world_->Make(setup);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *std::move(engine) : nullptr;
}

void IoEngineSuite::Restart(const IoEngineWorld::Setup& setup) {
  engine_ = nullptr;
  engine_ = Make(setup);
  ASSERT_NE(engine_, nullptr);
}

FileId IoEngineSuite::Create(const std::string& name, uint64_t bytes) {
  const auto file = engine_->Open(Path(name), bytes, OpenMode::kCreate);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.value_or(FileId());
}

FileId IoEngineSuite::Open(const std::string& name, uint64_t bytes) {
  const auto file = engine_->Open(Path(name), bytes, OpenMode::kOpen);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.value_or(FileId());
}

FileId IoEngineSuite::OpenExtent(IoEngine& engine, const Extent& extent) const {
  const auto file = engine.OpenExtent(Path("device"), extent);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.value_or(FileId());
}

IoRequest IoEngineSuite::Write(FileId file, uint64_t offset,
                               const IoBuffer& buffer, IoPriority priority) {
  IoRequest request;
  request.kind = Kind::kWrite;
  request.priority = priority;
  request.file = file;
  request.offset_bytes = offset;
  request.buffer = buffer.span();
  return request;
}

IoRequest IoEngineSuite::Read(FileId file, uint64_t offset,
                              const IoBuffer& buffer, IoPriority priority) {
  IoRequest request = Write(file, offset, buffer, priority);
  request.kind = Kind::kRead;
  return request;
}

IoRequest IoEngineSuite::Sync(FileId file) {
  IoRequest request;
  request.kind = Kind::kSync;
  request.file = file;
  return request;
}

std::vector<IoRequest*> IoEngineSuite::RunAll(absl::Span<IoRequest> requests) {
  for (IoRequest& request : requests) engine_->Submit(&request);
  std::vector<IoRequest*> order;
  std::array<IoRequest*, 4> completed;
  while (engine_->in_flight() > 0) {
    const size_t count = engine_->Poll(absl::MakeSpan(completed), true);
    order.insert(order.end(), completed.begin(), completed.begin() + count);
  }
  EXPECT_EQ(order.size(), requests.size());
  return order;
}

absl::Status IoEngineSuite::Run(IoRequest request) {
  RunAll(absl::MakeSpan(&request, 1));
  return request.status;
}

namespace {

TEST_P(IoEngineSuite, ReadsWhatWasWritten) {
  const FileId file = Create("f", 16 * kSectorBytes);
  IoBuffer first(kSectorBytes);
  IoBuffer second(3 * kSectorBytes);
  first.Fill(1);
  second.Fill(2);
  EXPECT_EQ(Run(Write(file, 0, first)), absl::OkStatus());
  EXPECT_EQ(Run(Write(file, 13 * kSectorBytes, second)), absl::OkStatus());
  IoBuffer read_first(kSectorBytes);
  IoBuffer read_second(3 * kSectorBytes);
  EXPECT_EQ(Run(Read(file, 0, read_first)), absl::OkStatus());
  EXPECT_EQ(Run(Read(file, 13 * kSectorBytes, read_second)), absl::OkStatus());
  EXPECT_TRUE(read_first == first);
  EXPECT_TRUE(read_second == second);
}

TEST_P(IoEngineSuite, NewFileIsZero) {
  const FileId file = Create("f", 64 * kSectorBytes);
  IoBuffer buffer(64 * kSectorBytes);
  buffer.Fill(1);
  EXPECT_EQ(Run(Read(file, 0, buffer)), absl::OkStatus());
  const auto span = buffer.span();
  EXPECT_TRUE(std::all_of(span.begin(), span.end(),
                          [](std::byte b) { return b == std::byte{0}; }));
}

TEST_P(IoEngineSuite, LargeRequests) {
  constexpr uint64_t kBytes = (uint64_t{12} << 20) + kSectorBytes;
  const FileId file = Create("f", 4 * kBytes);
  std::vector<IoBuffer> written;
  std::vector<IoBuffer> read;
  std::vector<IoRequest> writes;
  std::vector<IoRequest> reads;
  for (uint64_t i = 0; i < 3; ++i) {
    written.emplace_back(kBytes).Fill(i);
    read.emplace_back(kBytes);
    writes.push_back(Write(file, kSectorBytes + i * kBytes, written[i]));
    reads.push_back(Read(file, kSectorBytes + i * kBytes, read[i]));
  }
  RunAll(absl::MakeSpan(writes));
  RunAll(absl::MakeSpan(reads));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(writes[i].status, absl::OkStatus());
    EXPECT_EQ(reads[i].status, absl::OkStatus());
    EXPECT_TRUE(read[i] == written[i]) << i;
  }
}

// More than an engine registers with the kernel.
TEST_P(IoEngineSuite, ManyFiles) {
  constexpr int kFiles = 80;
  std::vector<FileId> files;
  std::vector<IoBuffer> buffers;
  std::vector<IoRequest> requests;
  requests.reserve(kFiles);
  for (int i = 0; i < kFiles; ++i) {
    files.push_back(Create("f" + std::to_string(i), kSectorBytes));
    buffers.emplace_back(kSectorBytes).Fill(i);
  }
  for (int i = 0; i < kFiles; ++i) {
    requests.push_back(Write(files[i], 0, buffers[i]));
  }
  RunAll(absl::MakeSpan(requests));
  for (int i = 0; i < kFiles; ++i) {
    EXPECT_EQ(requests[i].status, absl::OkStatus());
    IoBuffer read(kSectorBytes);
    EXPECT_EQ(Run(Read(files[i], 0, read)), absl::OkStatus());
    EXPECT_TRUE(read == buffers[i]) << i;
  }
}

TEST_P(IoEngineSuite, ClosedFileKeepsItsBytesAndGivesItsPlaceAway) {
  IoBuffer a(kSectorBytes);
  IoBuffer b(kSectorBytes);
  a.Fill(1);
  b.Fill(2);
  const FileId first = Create("a", kSectorBytes);
  EXPECT_EQ(Run(Write(first, 0, a)), absl::OkStatus());
  engine().Close(first);
  const FileId second = Create("b", kSectorBytes);
  EXPECT_EQ(Run(Write(second, 0, b)), absl::OkStatus());
  const FileId again = Open("a", kSectorBytes);
  IoBuffer read(kSectorBytes);
  EXPECT_EQ(Run(Read(again, 0, read)), absl::OkStatus());
  EXPECT_TRUE(read == a);
  EXPECT_EQ(Run(Read(second, 0, read)), absl::OkStatus());
  EXPECT_TRUE(read == b);
}

TEST_P(IoEngineSuite, FilesOutliveTheEngine) {
  IoBuffer buffer(kSectorBytes);
  buffer.Fill(1);
  const FileId file = Create("f", 2 * kSectorBytes);
  EXPECT_EQ(Run(Write(file, kSectorBytes, buffer)), absl::OkStatus());
  EXPECT_EQ(Run(Sync(file)), absl::OkStatus());
  Restart({});
  IoBuffer read(kSectorBytes);
  EXPECT_EQ(Run(Read(Open("f", 2 * kSectorBytes), kSectorBytes, read)),
            absl::OkStatus());
  EXPECT_TRUE(read == buffer);
}

TEST_P(IoEngineSuite, CreateKeepsAFileThatExists) {
  IoBuffer buffer(kSectorBytes);
  buffer.Fill(1);
  const FileId file = Create("f", kSectorBytes);
  EXPECT_EQ(Run(Write(file, 0, buffer)), absl::OkStatus());
  engine().Close(file);
  EXPECT_EQ(
      engine().Open(Path("f"), kSectorBytes, OpenMode::kCreate).status().code(),
      absl::StatusCode::kAlreadyExists);
  IoBuffer read(kSectorBytes);
  EXPECT_EQ(Run(Read(Open("f", kSectorBytes), 0, read)), absl::OkStatus());
  EXPECT_TRUE(read == buffer);
}

TEST_P(IoEngineSuite, MissingPaths) {
  for (const OpenMode mode : {OpenMode::kOpen, OpenMode::kCreate}) {
    EXPECT_TRUE(absl::IsNotFound(
        engine().Open(Path("none/f"), kSectorBytes, mode).status()));
  }
  EXPECT_TRUE(absl::IsNotFound(
      engine().Open(Path("f"), kSectorBytes, OpenMode::kOpen).status()));
  EXPECT_TRUE(absl::IsNotFound(engine().Remove(Path("f"))));
}

TEST_P(IoEngineSuite, RemovedFileCanBeCreatedAgain) {
  IoBuffer buffer(kSectorBytes);
  buffer.Fill(1);
  const FileId file = Create("f", kSectorBytes);
  EXPECT_EQ(Run(Write(file, 0, buffer)), absl::OkStatus());
  engine().Close(file);
  EXPECT_EQ(engine().Remove(Path("f")), absl::OkStatus());
  EXPECT_TRUE(absl::IsNotFound(
      engine().Open(Path("f"), kSectorBytes, OpenMode::kOpen).status()));
  IoBuffer read(kSectorBytes);
  EXPECT_EQ(Run(Read(Create("f", kSectorBytes), 0, read)), absl::OkStatus());
  EXPECT_FALSE(read == buffer);
}

TEST_P(IoEngineSuite, RenamedFileTakesThePlaceOfAnother) {
  IoBuffer buffers[] = {IoBuffer(kSectorBytes), IoBuffer(kSectorBytes)};
  for (uint64_t i = 0; i < 2; ++i) {
    buffers[i].Fill(i + 1);
    const FileId file = Create(i == 0 ? "f" : "g", kSectorBytes);
    EXPECT_EQ(Run(Write(file, 0, buffers[i])), absl::OkStatus());
    engine().Close(file);
  }
  EXPECT_EQ(engine().Rename(Path("g"), Path("f")), absl::OkStatus());
  IoBuffer read(kSectorBytes);
  EXPECT_EQ(Run(Read(Open("f", kSectorBytes), 0, read)), absl::OkStatus());
  EXPECT_TRUE(read == buffers[1]);
  EXPECT_TRUE(absl::IsNotFound(engine().Rename(Path("g"), Path("h"))));
}

TEST_P(IoEngineSuite, FileLargerThanTheDiskLeavesNothingBehind) {
  const uint64_t bytes =
      (world().TooManyBytes() / kSectorBytes + 1) * kSectorBytes;
  const absl::Status status =
      engine().Open(Path("f"), bytes, OpenMode::kCreate).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find(std::to_string(bytes)), std::string::npos)
      << status;
  EXPECT_NE(status.message().find("left"), std::string::npos) << status;
  EXPECT_TRUE(
      absl::IsNotFound(engine().Open(Path("f"), 0, OpenMode::kOpen).status()));
}

TEST_P(IoEngineSuite, FileMayBeLongerButNotShorter) {
  engine().Close(Create("f", 2 * kSectorBytes));
  const absl::Status status =
      engine().Open(Path("f"), 3 * kSectorBytes, OpenMode::kOpen).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_NE(status.message().find(Path("f")), std::string::npos) << status;
  Open("f", kSectorBytes);
}

TEST_P(IoEngineSuite, ReadingPastTheEndIsDataLoss) {
  const FileId file = Create("f", 4 * kSectorBytes);
  IoBuffer buffer(2 * kSectorBytes);
  EXPECT_EQ(Run(Read(file, 2 * kSectorBytes, buffer)), absl::OkStatus());
  for (const uint64_t sector : {3, 4, 100}) {
    const absl::Status status = Run(Read(file, sector * kSectorBytes, buffer));
    EXPECT_TRUE(absl::IsDataLoss(status)) << sector << " " << status;
    EXPECT_NE(status.message().find(Path("f")), std::string::npos) << status;
  }
  world().Truncate(Path("f"), kSectorBytes + 512);
  EXPECT_TRUE(absl::IsDataLoss(Run(Read(file, kSectorBytes, buffer))));
  EXPECT_TRUE(absl::IsDataLoss(Run(Read(file, 2 * kSectorBytes, buffer))));
}

TEST_P(IoEngineSuite, LockIsHeldUntilTheFileIsClosed) {
  const FileId file = Create("f", kSectorBytes);
  const auto other = Make({});
  const absl::Status status =
      other->Open(Path("f"), kSectorBytes, OpenMode::kOpen).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_NE(status.message().find(Path("f")), std::string::npos) << status;
  engine().Close(file);
  EXPECT_EQ(other->Open(Path("f"), kSectorBytes, OpenMode::kOpen).status(),
            absl::OkStatus());
}

TEST_P(IoEngineSuite, LockIsHeldUntilTheEngineIsDestroyed) {
  auto other = Make({});
  EXPECT_EQ(other->Open(Path("f"), kSectorBytes, OpenMode::kCreate).status(),
            absl::OkStatus());
  EXPECT_TRUE(absl::IsUnavailable(
      engine().Open(Path("f"), kSectorBytes, OpenMode::kOpen).status()));
  other = nullptr;
  Open("f", kSectorBytes);
}

}  // namespace
}  // namespace optstate::io
