#include "server/scheduler/state_placement.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "storage/tiers/host_store.h"

namespace optstate::scheduler {
namespace {

constexpr uint64_t kElements = uint64_t{8} << 20;
constexpr uint64_t kRounding = uint64_t{1} << 18;  // half a huge page
constexpr uint64_t kSubgroup = uint64_t{1} << 20;

// An array of the state as a tier maps it.
class Array {
 public:
  Array()
      : data_(::mmap(nullptr, kElements * sizeof(float), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~Array() { ::munmap(data_, kElements * sizeof(float)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  float* data() { return static_cast<float*>(data_); }
  // Returns -1 on a kernel without NUMA.
  int PolicyAt(uint64_t element) {
    int policy = -1;
    return ::syscall(SYS_get_mempolicy, &policy, nullptr, 0, data() + element,
                     MPOL_F_ADDR) == 0
               ? policy
               : -1;
  }

 private:
  void* const data_;
};

class StatePlacementTest : public testing::Test {
 protected:
  StatePlacementTest() {
    LayoutSpec spec;
    spec.groups.resize(1);
    ParameterSpec parameter;
    parameter.name = "a";
    parameter.numel = static_cast<int64_t>(kElements);
    parameter.shape = {parameter.numel};
    parameter.dtype = DType::kBFloat16;
    spec.parameters = {parameter};
    layout_ = std::make_unique<Layout>(*Layout::Make(std::move(spec)));
    storage::StateArrays arrays;
    arrays.master = reinterpret_cast<std::byte*>(master_.data());
    arrays.parameters = reinterpret_cast<std::byte*>(parameters_.data());
    arrays.state[0] = reinterpret_cast<std::byte*>(exp_avg_.data());
    arrays.state[1] = reinterpret_cast<std::byte*>(exp_avg_sq_.data());
    store_ =
        std::make_unique<storage::HostStore>(layout_.get(), kSubgroup, arrays);
    plan_ = *StepPlan::Make(layout_.get(), Accumulation(), kSubgroup);
  }

  static WorkerPlacement OnNodes(const std::vector<int>& nodes) {
    WorkerPlacement placement;
    for (const int node : nodes) placement.seats.push_back({node, {}});
    return placement;
  }

  absl::Status Move(const WorkerPlacement& placement) {
    return MoveStateToNodes(*plan_, store_.get(), placement);
  }

  Array parameters_, master_, exp_avg_, exp_avg_sq_;
  std::unique_ptr<Layout> layout_;
  std::unique_ptr<storage::HostStore> store_;
  std::unique_ptr<StepPlan> plan_;
};

TEST_F(StatePlacementTest, OneNodeLeavesEverythingAlone) {
  EXPECT_TRUE(Move(OnNodes({0, 0, 0, 0})).ok());
  EXPECT_TRUE(Move({}).ok());
  EXPECT_NE(master_.PolicyAt(kRounding), MPOL_PREFERRED);
}

// No machine has the second node: the node's part stays where it is.
TEST_F(StatePlacementTest, EachNodeGetsWhatItsWorkersOwn) {
  if (master_.PolicyAt(0) < 0) GTEST_SKIP() << "a kernel without NUMA";
  master_.data()[kElements - 1] = 3;
  EXPECT_FALSE(Move(OnNodes({0, 900, 900, 900})).ok());
  for (Array* array : {&master_, &exp_avg_, &exp_avg_sq_}) {
    EXPECT_EQ(array->PolicyAt(kRounding), MPOL_PREFERRED);
    EXPECT_EQ(array->PolicyAt(2 * kSubgroup - kRounding), MPOL_PREFERRED);
    EXPECT_EQ(array->PolicyAt(2 * kSubgroup + kRounding), MPOL_DEFAULT);
    EXPECT_EQ(array->PolicyAt(kElements - kRounding), MPOL_DEFAULT);
  }
  // The parameter area is half as large.
  EXPECT_EQ(parameters_.PolicyAt(kRounding), MPOL_PREFERRED);
  EXPECT_EQ(parameters_.PolicyAt(kSubgroup - kRounding), MPOL_PREFERRED);
  EXPECT_EQ(parameters_.PolicyAt(kSubgroup + kRounding), MPOL_DEFAULT);
  EXPECT_EQ(master_.data()[kElements - 1], 3);
}

}  // namespace
}  // namespace optstate::scheduler
