#include "client/collective/single_rank.h"

#include <cstring>

#include "client/collective/collective_base.h"

namespace optstate::client {
namespace {

void Copy(absl::Span<const std::byte> in, absl::Span<std::byte> out) {
  if (in.empty() || in.data() == out.data()) return;
  std::memcpy(out.data(), in.data(), in.size());
}

class SingleRank final : public CollectiveBase {
 public:
  SingleRank() : CollectiveBase(/*rank=*/0, /*world_size=*/1) {}

  absl::string_view name() const override { return "single"; }
  MemoryKind memory() const override { return MemoryKind::kHost; }

 protected:
  absl::Status RunAllReduce(ElementType,
                            absl::Span<const SumBuffers> buffers) override {
    for (const SumBuffers& each : buffers) Copy(each.in, each.out);
    return absl::OkStatus();
  }
  absl::Status RunReduceScatter(ElementType, absl::Span<const std::byte> in,
                                absl::Span<std::byte> out) override {
    Copy(in, out);
    return absl::OkStatus();
  }
  absl::Status RunReduce(ElementType, uint32_t, absl::Span<const std::byte> in,
                         absl::Span<std::byte> out) override {
    Copy(in, out);
    return absl::OkStatus();
  }
  absl::Status RunAllGather(absl::Span<const std::byte> in,
                            absl::Span<std::byte> out) override {
    Copy(in, out);
    return absl::OkStatus();
  }
  absl::Status RunBroadcast(uint32_t, absl::Span<std::byte>) override {
    return absl::OkStatus();
  }
  absl::Status RunBarrier() override { return absl::OkStatus(); }
  void Wake() override {}
  void Leave(const absl::Status&) override {}
};

}  // namespace

std::unique_ptr<Collective> MakeSingleRank() {
  return std::make_unique<SingleRank>();
}

}  // namespace optstate::client
