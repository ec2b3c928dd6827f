/* The numbers of optstate's C API for what has a name elsewhere: a part of
 * c_api.h, which includes it. They equal those of optstate.v1. */
#ifndef OPTSTATE_CLIENT_C_API_CONSTANTS_H_
#define OPTSTATE_CLIENT_C_API_CONSTANTS_H_

/* dtype */
#define OPTSTATE_FLOAT32 1
#define OPTSTATE_BFLOAT16 2
#define OPTSTATE_FLOAT16 3
/* optimizer */
#define OPTSTATE_ADAM 1
#define OPTSTATE_ADAMW 2
#define OPTSTATE_SGD 3
#define OPTSTATE_ADAGRAD 4
#define OPTSTATE_RMSPROP 5
#define OPTSTATE_LION 6
#define OPTSTATE_NADAM 7
#define OPTSTATE_RADAM 8
#define OPTSTATE_LAMB 9
#define OPTSTATE_ADAFACTOR 10
#define OPTSTATE_MUON 11
#define OPTSTATE_HYPERPARAMS_MAX 12
/* state format */
#define OPTSTATE_STATE_FLOAT32 1
#define OPTSTATE_STATE_BFLOAT16 2
#define OPTSTATE_STATE_DYNAMIC8 3
/* The master format: the fp32 values of 16-bit parameters are floats beside
 * them, or 16 bits beside the bfloat16 parameter, which is the upper half. */
#define OPTSTATE_MASTER_FLOAT32 1
#define OPTSTATE_MASTER_SPLIT 2
/* accumulate dtype: the dtype of the sums of micro-steps */
#define OPTSTATE_ACCUMULATE_FLOAT32 1
/* The gradients' dtype: each addition in float32, rounded to nearest even. */
#define OPTSTATE_ACCUMULATE_GRADIENT 2
/* partition */
#define OPTSTATE_GREEDY 1
#define OPTSTATE_CONTIGUOUS 2
#define OPTSTATE_REPLICATED 3 /* the daemon sums all ranks' whole gradients */
#define OPTSTATE_LOCAL 4      /* parameters are shards that have owners */
/* state array */
#define OPTSTATE_MASTER 1
#define OPTSTATE_STATE_0 2 /* optstate_optimizer_info's arrays, in order */
#define OPTSTATE_STATE_1 3
#define OPTSTATE_STATE_2 4
#define OPTSTATE_STEP_COUNT 5 /* int64, one per parameter */
#define OPTSTATE_SCALAR 6     /* double, one per parameter */
/* double, one per parameter, only fetched: the L2 norm of its gradient in the
 * last committed step, unscaled and not clipped; -1: it had none */
#define OPTSTATE_GRADIENT_NORM 7
/* the parameter itself, in its own dtype, only fetched: masters are loaded */
#define OPTSTATE_PARAMETER 8
/* double, one per parameter, which can only be fetched: the sum of squares of
 * its gradient in the step that is prepared, as it arrived; -1: it has none */
#define OPTSTATE_PREPARED_SUM 9
/* change detection */
#define OPTSTATE_DETECT_OFF 0
#define OPTSTATE_DETECT_SAMPLE 1 /* one line of 64 bytes of each 4 KiB */
#define OPTSTATE_DETECT_EXACT 2
/* phase */
#define OPTSTATE_PHASE_EMPTY 1
#define OPTSTATE_PHASE_LOADING 2
#define OPTSTATE_PHASE_READY 3
#define OPTSTATE_PHASE_FAILED 4
/* a step is being finished after a crash */
#define OPTSTATE_PHASE_RECOVERING 5

#endif /* OPTSTATE_CLIENT_C_API_CONSTANTS_H_ */
