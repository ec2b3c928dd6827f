// The session verbs that push gradients.

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/channel/channel.h"
#include "client/client.h"
#include "client/views/streaming_copy.h"
#include "proto/types/status_macros.h"

namespace optstate::client {
namespace {

// The size at which PushGradients submits copied gradients: the engine checks
// them while the next ones are copied.
constexpr uint64_t kPushBytes = 4 << 20;

}  // namespace

absl::Status Session::Push(uint64_t step, uint32_t micro_step, uint32_t first,
                           uint32_t count) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckParameters(first, count)));
  OPTSTATE_RETURN_IF_ERROR(
      AnnotateWithJob(AwaitGradientsBefore(first + count)));
  return AnnotateWithJob(PushRun(step, micro_step, first, count));
}

absl::Status Session::AwaitGradientsBefore(uint32_t parameter) {
  const size_t end = setup_->partition.LowerBound(parameter);
  if (end == 0) return absl::OkStatus();
  const Piece& last = setup_->partition.pieces[end - 1];
  return channel_->AwaitGradientArea(last.gradient_offset_bytes +
                                     GradientBytes(last));
}

absl::Status Session::PushRun(uint64_t step, uint32_t micro_step,
                              uint32_t first, uint32_t count) {
  OPTSTATE_RETURN_IF_ERROR(BeginAnew(step));
  begun_step_ = committed_step_ + 1;
  const absl::Status status = Persist([&] {
    return channel_->Push({.step = step,
                           .micro_step = micro_step,
                           .first_parameter = first,
                           .parameter_count = count},
                          StepDeadline());
  });
  if (!status.ok()) return NoteFailure(step, status);
  Mark(step, micro_step, first, count);
  return TakeFailedPush();
}

absl::Status Session::PushGradients(uint64_t step, uint32_t micro_step,
                                    absl::Span<const uint32_t> parameters,
                                    absl::Span<const void* const> gradients) {
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(CheckWhole()));
  OPTSTATE_RETURN_IF_ERROR(
      AnnotateWithJob(CheckGradients(parameters, gradients)));
  if (!parameters.empty()) {
    OPTSTATE_RETURN_IF_ERROR(
        AnnotateWithJob(AwaitGradientsBefore(parameters.back() + 1)));
  }
  OPTSTATE_RETURN_IF_ERROR(BeginAnew(step));
  // The engine may still read the last micro-step's gradients.
  if (options_.accumulate && unended_ && unended_->step == step &&
      unended_->micro_step < micro_step) {
    OPTSTATE_RETURN_IF_ERROR(EndMicroStep(step, unended_->micro_step));
  }
  const absl::Span<std::byte> area = channel_->gradient_area();
  PieceRun run;
  for (size_t i = 0; i < parameters.size(); ++i) {
    // The next piece usually belongs to the next parameter.
    const size_t at = OwnsAt(run.end, parameters[i])
                          ? run.end
                          : setup_->partition.LowerBound(parameters[i]);
    if (!OwnsAt(at, parameters[i])) continue;
    if (at != run.end || run.bytes >= kPushBytes) {
      OPTSTATE_RETURN_IF_ERROR(PushCopied(step, micro_step, run));
      run = {.begin = at, .end = at, .bytes = 0};
    }
    const bool may_copy = MayCopy(at, step, micro_step);
    run.bytes += PutGradient(at, may_copy ? gradients[i] : nullptr, area);
    ++run.end;
  }
  return PushCopied(step, micro_step, run);
}

// Checks everything before the first copy, so that a refused call changes
// nothing.
absl::Status Session::CheckGradients(
    absl::Span<const uint32_t> parameters,
    absl::Span<const void* const> gradients) const {
  if (parameters.size() != gradients.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        parameters.size(), " parameters, ", gradients.size(), " gradients"));
  }
  const absl::Span<const ParameterSpec> specs = setup_->layout.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] >= specs.size()) return CheckParameters(parameters[i], 1);
    if (i > 0 && parameters[i] <= parameters[i - 1]) {
      return absl::InvalidArgumentError("the parameters do not ascend");
    }
    if (gradients[i] == nullptr && specs[parameters[i]].numel != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the gradient of parameter ", parameters[i], " is null"));
    }
  }
  return absl::OkStatus();
}

absl::Status Session::PushCopied(uint64_t step, uint32_t micro_step,
                                 const PieceRun& run) {
  if (run.begin == run.end) return absl::OkStatus();
  StreamingFence();
  const uint32_t first = setup_->partition.pieces[run.begin].parameter;
  const uint32_t last = setup_->partition.pieces[run.end - 1].parameter;
  OPTSTATE_RETURN_IF_ERROR(
      AnnotateWithJob(PushRun(step, micro_step, first, last - first + 1)));
  return channel_->releases_gradients() ? ReleaseCopied(run) : absl::OkStatus();
}

// Waits until the engine has the gradients, and gives their memory back: a
// session that has no room for all parameters has none for all gradients.
absl::Status Session::ReleaseCopied(const PieceRun& run) {
  const absl::Status flushed =
      Persist([&] { return channel_->Flush(StepDeadline()); });
  if (!flushed.ok()) {
    return AnnotateWithJob(NoteFailure(committed_step_ + 1, flushed));
  }
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(TakeFailedPush()));
  for (size_t i = run.begin; i < run.end; ++i) {
    const Piece& piece = setup_->partition.pieces[i];
    channel_->ReleaseGradients(
        piece.gradient_offset_bytes,
        piece.gradient_offset_bytes + GradientBytes(piece));
    marks_[i].is_released = true;
  }
  return absl::OkStatus();
}

bool Session::OwnsAt(size_t piece, uint32_t parameter) const {
  const auto& pieces = setup_->partition.pieces;
  return piece < pieces.size() && pieces[piece].parameter == parameter;
}

// Drops the gradients of the open step where a new attempt at the step needs
// that. After a commit whose answer was not awaited, another commit goes on
// with the pushed gradients, but a push begins the step again, perhaps with
// other gradients: the engine must first drop the former ones, which it may be
// reading. After a failed push both begin the step again.
absl::Status Session::BeginAnew(uint64_t step) {
  if (step != committed_step_ + 1 || !(commit_unresolved_ || push_failed_)) {
    return absl::OkStatus();
  }
  OPTSTATE_RETURN_IF_ERROR(AnnotateWithJob(
      Persist([&] { return channel_->Abort(step, StepDeadline()); })));
  ForgetStaged();
  begun_step_ = 0;
  return absl::OkStatus();
}

// Returns whether the piece's place in the gradient area is free. The engine
// reads the place until the step is applied, unless it accumulates; a push that
// it will refuse, or ignore as a repeat, must not overwrite staged gradients.
bool Session::MayCopy(size_t piece, uint64_t step, uint32_t micro_step) const {
  const PieceMark& mark = marks_[piece];
  if (step != committed_step_ + 1) return false;
  if (mark.step != step) return true;
  return options_.accumulate && micro_step > mark.micro_step;
}

uint64_t Session::PutGradient(size_t index, const void* gradient,
                              absl::Span<std::byte> area) {
  const Piece& piece = setup_->partition.pieces[index];
  const uint64_t element_bytes =
      SizeInBytes(setup_->layout.parameters()[piece.parameter].gradient_dtype);
  const uint64_t bytes = piece.numel * element_bytes;
  if (gradient == nullptr) return bytes;
  std::byte* const to = area.data() + piece.gradient_offset_bytes;
  const std::byte* const from =
      static_cast<const std::byte*>(gradient) + piece.begin * element_bytes;
  // The caller may have made the gradient in its place.
  if (from != to) StreamingCopy(to, from, bytes, area.size());
  return bytes;
}

void Session::Mark(uint64_t step, uint32_t micro_step, uint32_t first,
                   uint32_t count) {
  if (step != committed_step_ + 1) return;
  const auto& partition = setup_->partition;
  const size_t end = partition.LowerBound(first + count);
  for (size_t i = partition.LowerBound(first); i < end; ++i) {
    PieceMark& mark = marks_[i];
    if (mark.step != step) mark = PieceMark();
    if (mark.micro_step != micro_step) {
      mark.micro_step_before = mark.micro_step;
    }
    mark.step = step;
    mark.micro_step = micro_step;
    mark.ended = ended_;
    mark.is_released = false;
  }
  unended_ = {.step = step, .micro_step = micro_step};
  refused_push_ = absl::OkStatus();
}

}  // namespace optstate::client
