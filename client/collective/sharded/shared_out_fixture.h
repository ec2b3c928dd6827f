#ifndef OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_FIXTURE_H_
#define OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_FIXTURE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "client/collective/collective.h"
#include "client/collective/nodes/places.h"
#include "client/collective/sharded/shared_out.h"
#include "gtest/gtest.h"
#include "proto/types/layout.h"
#include "tests/conformance/step_script.h"
#include "tests/integration/daemon_fixture.h"

namespace optstate::client {

using Arrays = std::vector<std::vector<std::byte>>;  // by parameter

// One rank, as a test has it.
struct SharedRank {
  uint32_t rank = 0;
  std::unique_ptr<SharedOut> shared;
  std::unique_ptr<Session> session;
  Arrays parameters;

  std::vector<absl::Span<std::byte>> spans();
};

void ExpectAllOk(const std::vector<absl::Status>& results);

// Nodes that share out the parameters of a job, beside a job on one node that
// takes the same steps. A node is a job of its own in the one daemon, since
// nothing but its ranks connects it to the others.
class SharedOutTest : public testing::Test {
 protected:
  SharedOutTest() : SharedOutTest(/*is_ephemeral=*/true) {}
  // `is_ephemeral`: jobs end with their last ranks.
  explicit SharedOutTest(bool is_ephemeral);

  static void SetUpTestSuite();
  static void TearDownTestSuite();
  // Opens the job on one node, and loads it.
  void SetUp() override;

  // The session options of a node's job, before SharedOut::Place().
  SessionOptions OptionsOf(size_t node) const;
  static Places PlacesOf(const Collective& collective, uint32_t ranks_of_node);

  // Settles and attaches a rank, loads into a new job what the one node has
  // loaded, and reads all parameters. Collective.
  absl::StatusOr<SharedRank> Attach(Collective& collective,
                                    const SharedOutOptions& how,
                                    uint32_t ranks_of_node = 1);

  // Makes a step whose norm depends on the order in which squares are added,
  // and that is clipped. `draw`: of the gradients.
  StepScript::Step MakeRoughStep(uint64_t step, uint64_t draw) const;

  // Takes a step of which every rank has these gradients, so that their mean
  // is them. Collective.
  static absl::StatusOr<Outcome> Take(SharedRank& rank,
                                      const StepScript::Step& made,
                                      bool found_inf);
  // Takes it on the one node.
  Outcome TakeOnOne(const StepScript::Step& made, bool found_inf);

  // Compares with the one node: what is known of a step that both have taken,
  // a rank's parameters, and the state of all shards of the rank's node.
  static void ExpectOutcomeOfOne(const Outcome& outcome, const Outcome& of_one);
  void ExpectParametersOfOne(const SharedRank& rank);
  void ExpectStateOfOne(Session& node);

  static inline TestDaemon* daemon_ = nullptr;

  const LayoutSpec layout_;
  const StepScript script_;
  SessionOptions job_;  // of the one node
  std::unique_ptr<Session> one_;
  Arrays masters_;  // that are loaded
};

}  // namespace optstate::client

#endif  // OPTSTATE_CLIENT_COLLECTIVE_SHARDED_SHARED_OUT_FIXTURE_H_
