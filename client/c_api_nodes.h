/* The part of optstate's C API for jobs on several nodes, each with a daemon of
 * its own. A session with optstate_session_options.two_phase prepares a step in
 * optstate_commit (optstate_outcome.prepared). The caller exchanges the digests
 * of all nodes, and brings what all decided to each. */
#ifndef OPTSTATE_CLIENT_C_API_NODES_H_
#define OPTSTATE_CLIENT_C_API_NODES_H_

#include <stddef.h>
#include <stdint.h>

#include "client/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A job, asked for without a rank of it. */
typedef struct {
  size_t struct_size;
  const char* endpoint; /* as optstate_session_options has it */
  const char* job;
  double timeout_s; /* 0: 30 */
  const char* daemon_path;
  int32_t (*interrupted)(void* context); /* may be NULL */
  void* interrupted_context;
} optstate_job_address;

/* How far a job is; see v1.PositionReply. */
typedef struct {
  size_t struct_size;
  uint64_t committed_step;
  int32_t phase;
  int32_t found_inf;      /* the committed step was skipped */
  uint64_t digest;        /* of the committed step; 0: taken in one phase */
  uint64_t prepared_step; /* 0: none is */
  uint64_t prepared_digest;
  int32_t prepared_found_inf;
  uint32_t loads_finished;
  uint64_t durable_step;
  /* These two are the committed step's, as optstate_outcome has them. */
  double gradient_norm;
  double clip_coefficient;
  /* These three are the prepared step's, in the same way. is_clipped: the norm
   * and the coefficient are of all nodes. */
  double prepared_gradient_norm;
  double prepared_clip_coefficient;
  int32_t prepared_is_clipped;
  /* optstate_commit_options.awaits_norm of the prepared step. */
  int32_t prepared_awaits_norm;
} optstate_job_position;

/* CLIP: the node has only some of the parameters, and the norm and the clip
 * coefficient in the verdict, of all nodes, replace its own. The step stays
 * prepared, and another verdict follows. */
enum {
  OPTSTATE_VERDICT_COMMIT = 1,
  OPTSTATE_VERDICT_SKIP = 2,
  OPTSTATE_VERDICT_ABORT = 3,
  OPTSTATE_VERDICT_CLIP = 5
};

/* The decision of all nodes about a prepared step; see v1.DecideRequest. */
typedef struct {
  size_t struct_size;
  uint64_t step;
  uint64_t digest; /* of what this node prepared */
  int32_t verdict;
  double gradient_norm; /* these two with CLIP alone */
  double clip_coefficient;
} optstate_verdict;

/* Takes (COMMIT, or SKIP: without an update), drops (ABORT) or clips (CLIP) the
 * step that optstate_commit prepared. A repeat has the same result. */
OPTSTATE_EXPORT int optstate_decide(optstate_session* session,
                                    const optstate_verdict* verdict,
                                    optstate_outcome* outcome);
/* Asks how far a job is: NOT_FOUND when there is none. */
OPTSTATE_EXPORT int optstate_find_position(const optstate_job_address* address,
                                           optstate_job_position* position);
/* Does what optstate_decide does, without a session. */
OPTSTATE_EXPORT int optstate_bring_verdict(const optstate_job_address* address,
                                           const optstate_verdict* verdict,
                                           optstate_outcome* outcome);

/* Does what optstate_finish_load does, in a job that has taken no step and
 * takes over the state of another one, on other nodes or ranks: with the end of
 * this load the job is at that one's step (below 2^63), after as many loads
 * (not 0), whole or not at all; see v1.FinishLoadRequest. Equal on all ranks.
 * FAILED_PRECONDITION: the job has taken a step, or the load changes parameters
 * that have a state. UNIMPLEMENTED: the daemon is of an older build. */
OPTSTATE_EXPORT int optstate_finish_load_at(optstate_session* session,
                                            uint64_t step,
                                            uint32_t loads_finished);

#ifdef __cplusplus
}
#endif

#endif /* OPTSTATE_CLIENT_C_API_NODES_H_ */
