#ifndef OPTSTATE_SERVER_SESSION_TESTING_STEP_ROOMS_H_
#define OPTSTATE_SERVER_SESSION_TESTING_STEP_ROOMS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/session/steps/micro_step_summer.h"
#include "server/session/steps/staging_marks.h"
#include "server/session/steps/step_committer.h"
#include "server/session/steps/step_stager.h"
#include "server/session/testing/recording_listener.h"
#include "server/session/testing/room_fixture.h"

namespace optstate::session {

// The rooms of a step that all ranks take, above those at the bottom.
class StepRooms : public LowerRooms {
 public:
  explicit StepRooms(Job::Options options)
      : LowerRooms(std::move(options)),
        marks_(&job_, &ranks_, &step_),
        sums_(&job_, &ranks_, &step_, &marks_),
        stager_({.job = &job_,
                 .ranks = &ranks_,
                 .step = &step_,
                 .marks = &marks_,
                 .sums = &sums_,
                 .speculator = &speculator_}),
        committer_({.job = &job_,
                    .ranks = &ranks_,
                    .step = &step_,
                    .decider = &decider_,
                    .durability = &durability_}) {}

  StagingMarks marks_;
  MicroStepSummer sums_;
  StepStager stager_;
  StepCommitter committer_;
};

// Returns the registration of a job of so many ranks, each with gradients of
// all parameters.
inline RegisterSpec ReplicatedSpec(uint32_t world_size, bool accumulate) {
  RegisterSpec spec = TwoRankSpec();
  spec.world_size = spec.local_world_size = world_size;
  spec.partition = PartitionMode::kReplicated;
  spec.accumulate = accumulate;
  return spec;
}

// A test of a room above `Rooms`, which have those of a step. The job is READY,
// all masters are 0, and all ranks are attached; rank r is client instance
// kInstance + r and has the gradient r + 1 for each element.
template <class Rooms>
class AttachedRoomTest : public RoomTest<Rooms> {
 protected:
  static constexpr uint64_t kInstance = 70;

  explicit AttachedRoomTest(const RegisterSpec& spec = TwoRankSpec())
      : RoomTest<Rooms>(spec),
        groups_(spec.layout.groups().size(), AdamHyperparams()) {
    this->MakeReady();
    for (uint32_t rank = 0; rank < spec.world_size; ++rank) {
      listeners_.push_back(std::make_unique<RecordingListener>());
      areas_.emplace_back(
          this->job_.shape->partitions[rank].gradient_area_bytes /
              sizeof(float),
          static_cast<float>(rank + 1));
      AttachRank(rank);
    }
  }

  AttachSpec AttachSpecOf(uint32_t rank) const {
    AttachSpec spec;
    spec.rank = rank;
    spec.layout_hash = this->job_.layout().hash();
    spec.gradient_area =
        reinterpret_cast<const std::byte*>(areas_[rank].data());
    spec.gradient_area_bytes = areas_[rank].size() * sizeof(float);
    spec.listener = listeners_[rank].get();
    spec.client_instance = kInstance + rank;
    return spec;
  }
  void AttachRank(uint32_t rank) {
    const AttachSpec spec = AttachSpecOf(rank);
    this->job_.rank_mark(rank).client_instance = spec.client_instance;
    this->ranks_.Attach(spec);
    this->ranks_.gradient_area(rank) = spec.gradient_area;
  }
  // Ends the sessions, and forgets what they had staged, as the end of the
  // engine does: the ranks are awaited.
  void ForgetSessions() {
    this->step_.open_step.DropAll();
    this->step_.micro_steps.DropAll();
    for (uint32_t rank = 0; rank < this->ranks_.size(); ++rank) {
      if (this->ranks_.state(rank) == RankState::kAttached) {
        this->ranks_.Await(rank);
      }
      this->ranks_.gradient_area(rank) = nullptr;
    }
  }

  uint64_t next_step() const { return this->job_.record().committed_step + 1; }
  CommitSpec CommitOf(uint64_t step) const {
    CommitSpec spec;
    spec.step = step;
    spec.groups = groups_;
    return spec;
  }
  absl::Status Push(uint32_t rank, uint32_t first, uint32_t end,
                    uint32_t micro_step = 0) {
    return this->stager_.Stage(rank, next_step(), micro_step, first, end);
  }
  void NoteCommit(uint32_t rank, uint64_t request_id) {
    if (!this->job_.recovery.has_value()) this->step_.progress.Open();
    this->step_.open_step.NoteCommit(rank, request_id, CommitOf(next_step()));
  }
  // Has the rank wait for the end of its micro-step.
  void NoteEnding(uint32_t rank, uint64_t request_id) {
    this->ranks_.session(rank).ending = request_id;
  }
  // Has all ranks push all that they have and commit, and decides the step.
  StepDecision DecideStep(absl::Span<const uint8_t>* updated) {
    for (uint32_t rank = 0; rank < this->ranks_.size(); ++rank) {
      EXPECT_TRUE(Push(rank, 0, this->job_.parameter_count()).ok());
      NoteCommit(rank, rank + 1);
    }
    this->step_.progress.Decide();
    EXPECT_TRUE(this->stager_.ResolveParameters(updated).ok());
    return this->decider_.Decide(next_step(), *updated);
  }

  // Returns UNKNOWN while the request is not answered.
  absl::Status AnswerTo(uint32_t rank, uint64_t request_id) const {
    const auto* answer = listeners_[rank]->Find(request_id);
    return answer == nullptr ? absl::UnknownError("no answer") : answer->status;
  }
  // Returns the first element of each parameter.
  std::vector<float> FirstElements() const {
    std::vector<float> elements;
    for (uint32_t p = 0; p < this->job_.parameter_count(); ++p) {
      elements.push_back(*reinterpret_cast<const float*>(
          this->job_.store->parameter_area().data() +
          this->job_.layout().parameter_offset_bytes(p)));
    }
    return elements;
  }

  const std::vector<Hyperparams> groups_;
  std::vector<std::unique_ptr<RecordingListener>> listeners_;  // by rank
  std::vector<std::vector<float>> areas_;                      // by rank
};

using StepRoomFixture = AttachedRoomTest<StepRooms>;

}  // namespace optstate::session

#endif  // OPTSTATE_SERVER_SESSION_TESTING_STEP_ROOMS_H_
