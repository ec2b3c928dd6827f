// Random requests against a model, and requests that no engine may take.

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "storage/io/io_engine_suite.h"
#include "storage/io/test_seed.h"

namespace optstate::io {
namespace {

// A shared mapping of memory that has a file, as the state's is.
class SharedMemory {
 public:
  explicit SharedMemory(uint64_t bytes) : bytes_(bytes) {
    const int fd = ::memfd_create("io_engine_suite", MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return;
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory() {
    if (ok()) ::munmap(data_, bytes_);
  }
  bool ok() const { return data_ != MAP_FAILED; }
  absl::Span<std::byte> span() const {
    return {static_cast<std::byte*>(data_), bytes_};
  }

 private:
  void* data_ = MAP_FAILED;
  const uint64_t bytes_;
};

void FillAtRandom(absl::Span<std::byte> data, std::mt19937_64& random) {
  for (size_t i = 0; i < data.size(); i += sizeof(uint64_t)) {
    const uint64_t value = random();
    std::memcpy(data.data() + i, &value, sizeof(value));
  }
}

// Each request of a round has a place of its own in the file and in memory;
// half of the memory is registered, or none, by turns.
TEST_P(IoEngineSuite, RandomRequestsAgainstAModel) {
  constexpr uint64_t kPlaces = 24;
  constexpr uint64_t kPlaceBytes = 16 * kSectorBytes;
  constexpr uint64_t kBytes = kPlaces * kPlaceBytes;
  const SharedMemory registered(kBytes / 2);
  const SharedMemory other(kBytes / 2);
  ASSERT_TRUE(registered.ok() && other.ok());
  std::mt19937_64 random(TestSeed());
  Restart({.queue_depth = 1 + static_cast<int>(random() % 8)});
  engine().RegisterMemory(registered.span());
  FileId file = Create("f", kBytes);
  std::vector<std::byte> model(kBytes);
  for (int round = 0; round < 60; ++round) {
    std::vector<IoRequest> requests;
    for (uint64_t place = 0; place < kPlaces; ++place) {
      if (random() % 3 == 0) continue;
      const uint64_t begin = random() % 16;
      const uint64_t sectors = 1 + random() % (16 - begin);
      const auto memory = place % 2 == 0 ? registered.span() : other.span();
      IoRequest request;
      request.kind = random() % 2 == 0 ? Kind::kRead : Kind::kWrite;
      request.priority = static_cast<IoPriority>(random() % kIoPriorityCount);
      request.file = file;
      request.offset_bytes = place * kPlaceBytes + begin * kSectorBytes;
      request.buffer =
          memory.subspan(place / 2 * kPlaceBytes, sectors * kSectorBytes);
      FillAtRandom(request.buffer, random);
      if (request.kind == Kind::kWrite) {
        std::memcpy(model.data() + request.offset_bytes, request.buffer.data(),
                    request.buffer.size());
      }
      requests.push_back(request);
    }
    if (random() % 4 == 0) requests.push_back(Sync(file));
    RunAll(absl::MakeSpan(requests));
    for (const IoRequest& request : requests) {
      ASSERT_EQ(request.status, absl::OkStatus());
      ASSERT_EQ(absl::MakeConstSpan(model).subspan(request.offset_bytes,
                                                   request.buffer.size()),
                absl::MakeConstSpan(request.buffer))
          << "round " << round << " offset " << request.offset_bytes;
    }
    if (random() % 4 == 0) {
      const absl::Span<std::byte> memories[] = {registered.span(), other.span(),
                                                absl::Span<std::byte>()};
      engine().RegisterMemory(memories[random() % 3]);
    }
    if (random() % 8 == 0) {
      engine().Close(file);
      file = Open("f", kBytes);
    }
  }
}

TEST_P(IoEngineSuite, IllegalRequests) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const FileId file = Create("f", 4 * kSectorBytes);
  const IoBuffer buffer(2 * kSectorBytes);
  IoRequest request = Read(file, 512, buffer);
  EXPECT_DEATH(engine().Submit(&request), "multiple of kSectorBytes");
  request = Read(file, 0, buffer);
  request.buffer = buffer.span().first(512);
  EXPECT_DEATH(engine().Submit(&request), "multiple of kSectorBytes");
  request = Read(file, 0, buffer);
  request.buffer = buffer.span().subspan(512, kSectorBytes);
  EXPECT_DEATH(engine().Submit(&request), "multiple of kSectorBytes");
  request = Write(file, 3 * kSectorBytes, buffer);
  EXPECT_DEATH(engine().Submit(&request), "past the end");
  engine().Close(file);
  request = Read(file, 0, buffer);
  EXPECT_DEATH(engine().Submit(&request), "not open");
}

}  // namespace
}  // namespace optstate::io
