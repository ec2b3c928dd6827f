#ifndef OPTSTATE_STORAGE_IO_IO_ENGINE_SUITE_H_
#define OPTSTATE_STORAGE_IO_IO_ENGINE_SUITE_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "storage/io/io_engine.h"
#include "storage/io/io_hook.h"

namespace optstate::io {

// A disk for one test.
class IoEngineWorld {
 public:
  struct Setup {
    int queue_depth = 16;
    IoHook* hook = nullptr;
  };
  virtual ~IoEngineWorld() = default;
  // Makes an engine whose Open() soon gives up waiting for a lock. Engines of
  // one world see the same files. An error means that the machine refuses this
  // engine: the test is skipped with its text.
  virtual absl::StatusOr<std::unique_ptr<IoEngine>> Make(
      const Setup& setup) = 0;
  // A folder without files.
  virtual const std::string& folder() const = 0;
  // Returns more bytes than the disk has left.
  virtual uint64_t TooManyBytes() const = 0;
  // Cuts a file behind the engine's back.
  virtual void Truncate(const std::string& path, uint64_t bytes) = 0;
};

struct IoEngineWorldParam {
  std::string name;
  std::unique_ptr<IoEngineWorld> (*make)();
};
inline void PrintTo(const IoEngineWorldParam& param, std::ostream* out) {
  *out << param.name;
}
std::string IoEngineWorldName(
    const testing::TestParamInfo<IoEngineWorldParam>& info);

// Memory for requests.
class IoBuffer {
 public:
  // `bytes` is a multiple of kSectorBytes.
  explicit IoBuffer(uint64_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kSectorBytes, bytes))),
        bytes_(bytes) {
    Fill(0);
  }
  absl::Span<std::byte> span() const { return {data_.get(), bytes_}; }
  // Fills with bytes that follow from the seed and the place.
  void Fill(uint64_t seed);
  bool operator==(const IoBuffer& other) const {
    return absl::MakeConstSpan(span()) == absl::MakeConstSpan(other.span());
  }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte, Free> data_;
  uint64_t bytes_;
};

// The guarantees of an engine, whatever the disk. A binary that links the suite
// instantiates it:
//
//   INSTANTIATE_TEST_SUITE_P(Engines, IoEngineSuite, testing::Values(...),
//                            IoEngineWorldName);
class IoEngineSuite : public testing::TestWithParam<IoEngineWorldParam> {
 protected:
  using Kind = IoRequest::Kind;
  using OpenMode = IoEngine::OpenMode;

  void SetUp() override;
  // Makes one more engine on the same disk; stops the test when that fails.
  std::unique_ptr<IoEngine> Make(const IoEngineWorld::Setup& setup);
  // Replaces engine(), which loses its files.
  void Restart(const IoEngineWorld::Setup& setup);

  IoEngine& engine() { return *engine_; }
  IoEngineWorld& world() { return *world_; }
  std::string Path(const std::string& name) const {
    return world_->folder() + "/" + name;
  }
  // Opens a file that must open.
  FileId Create(const std::string& name, uint64_t bytes);
  FileId Open(const std::string& name, uint64_t bytes);
  // Opens an extent of the file "device", which must open.
  FileId OpenExtent(IoEngine& engine, const Extent& extent) const;

  static IoRequest Write(FileId file, uint64_t offset, const IoBuffer& buffer,
                         IoPriority priority = IoPriority::kSwapOut);
  static IoRequest Read(FileId file, uint64_t offset, const IoBuffer& buffer,
                        IoPriority priority = IoPriority::kSwapIn);
  static IoRequest Sync(FileId file);

  // Submits requests, and polls until all of them are completed. Returns them
  // in the order in which they were.
  std::vector<IoRequest*> RunAll(absl::Span<IoRequest> requests);
  // Runs one request and returns its status.
  absl::Status Run(IoRequest request);

 private:
  std::unique_ptr<IoEngineWorld> world_;
  std::unique_ptr<IoEngine> engine_;
};

}  // namespace optstate::io

#endif  // OPTSTATE_STORAGE_IO_IO_ENGINE_SUITE_H_
