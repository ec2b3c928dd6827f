#ifndef OPTSTATE_SERVER_TRANSPORT_OUTCOME_H_
#define OPTSTATE_SERVER_TRANSPORT_OUTCOME_H_

#include "optstate/v1/types.pb.h"
#include "server/session/job.h"

namespace optstate::transport {

inline v1::StepOutcome ToProto(const session::StepOutcome& outcome) {
  v1::StepOutcome proto;
  proto.set_step(outcome.step);
  proto.set_applied(outcome.applied);
  proto.set_found_inf(outcome.found_inf);
  proto.set_gradient_norm(outcome.gradient_norm);
  proto.set_clip_coefficient(outcome.clip_coefficient);
  proto.set_update_ns(outcome.update_ns);
  proto.set_loss_scale(outcome.loss_scale);
  proto.set_good_steps(outcome.good_steps);
  proto.set_hysteresis_left(outcome.hysteresis_left);
  proto.set_durable_step(outcome.durable_step);
  return proto;
}

}  // namespace optstate::transport

#endif  // OPTSTATE_SERVER_TRANSPORT_OUTCOME_H_
