/* optstate's C API: the base of every language binding.
 *
 * Status: every function that can fail returns an absl::StatusCode (0: OK);
 * optstate_last_error() is the text of this thread's last failure.
 * Structs: the caller sets struct_size to the sizeof of the struct that the
 * caller was compiled with; the library reads and writes no further, and takes
 * fields beyond it as 0. In an array of structs every element has the same
 * struct_size. New fields are added only at the end.
 * Threads: different sessions may be used by different threads at once; one
 * session by one thread at a time. Calls block the calling thread alone.
 * Memory: pointers into a session (gradient and parameter areas) are valid
 * until it is closed.
 */
#ifndef OPTSTATE_CLIENT_C_API_H_
#define OPTSTATE_CLIENT_C_API_H_

#include <stddef.h>
#include <stdint.h>

#include "client/c_api_constants.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OPTSTATE_EXPORT __attribute__((visibility("default")))

typedef struct optstate_session optstate_session;

typedef struct {
  size_t struct_size;
  const char* name;
  const int64_t* shape; /* ndim dimensions; may be NULL when ndim is 0 */
  size_t ndim;
  int64_t numel;
  int32_t dtype;
  int32_t gradient_dtype;
  uint32_t group; /* never decreases along the array */
  /* The place of a shard (partition OPTSTATE_LOCAL): the shape of the global
   * tensor whose name is `name` and where the shard begins in it, of ndim
   * dimensions each. With ndim 0 any address. Both NULL: it is not a shard. */
  const int64_t* global_shape;
  const int64_t* offset;
  uint32_t owner; /* the rank that pushes the shard's gradients and loads it */
} optstate_parameter;

typedef struct {
  size_t struct_size;
  uint32_t options; /* bits of optstate_optimizer_info.options */
} optstate_group;

/* One hyperparameter; torch's name ("lr"; of a tuple's part "betas.0"). */
typedef struct {
  size_t struct_size;
  const char* name;
  double default_value;
} optstate_hyperparam_info;

/* The description of an optimizer; strings and arrays stay valid for the life
 * of the process. */
typedef struct {
  size_t struct_size;
  int32_t optimizer;
  const char* name;                            /* "adamw" */
  const optstate_hyperparam_info* hyperparams; /* of optstate_hyperparams */
  size_t hyperparam_count;
  const char* const* state_arrays; /* torch's names */
  const uint32_t* state_options;   /* the option that brings it; 0: always */
  size_t state_array_count;
  const char* const* options; /* bit k of optstate_group.options */
  size_t option_count;
  const char* scalar; /* of OPTSTATE_SCALAR; "": none */
} optstate_optimizer_info;

/* The loss scaler of a job, kept by the daemon; see v1.LossScaler. */
typedef struct {
  size_t struct_size;
  int32_t dynamic;
  double init_scale;
  double growth_factor;
  double backoff_factor;
  uint32_t growth_interval;
  uint32_t hysteresis;
  double min_scale;
  /* The scale at the begin of a new job; 0: init_scale. Values of another job's
   * optstate_session_info continue that job; see v1.LossScalerState. */
  double begin_loss_scale;
  uint32_t begin_good_steps;
  uint32_t begin_hysteresis_left;
} optstate_loss_scaler;

typedef struct {
  size_t struct_size;
  /* "unix:PATH", "grpc:HOST:PORT", "grpc:unix:PATH" or "embedded". NULL or
   * empty: $OPTSTATE_ENDPOINT, else the node's daemon when its socket is there,
   * else "embedded". */
  const char* endpoint;
  const char* job;
  int32_t optimizer;
  int32_t partition; /* 0: greedy */
  uint32_t rank;
  uint32_t world_size;
  uint32_t local_world_size; /* 0: world_size */
  int32_t accumulate;
  int32_t ephemeral;
  int32_t extend;
  const optstate_group* groups;
  size_t group_count;
  const optstate_parameter* parameters;
  size_t parameter_count;
  double connect_timeout_s; /* 0: 30; also how long a lost engine is awaited */
  double step_timeout_s;    /* 0: 1800; waiting for the other ranks included */
  /* The path of optstated for "embedded"; NULL: $OPTSTATE_DAEMON, beside this
   * library, or on PATH. */
  const char* daemon_path;
  /* Called about every 50 ms by a call that waits for other ranks or for a
   * daemon: another value than 0 ends the wait with CANCELLED. Not called
   * during a load. NULL: waits are not interrupted. Called by the waiting
   * thread; it must not use the session, and no exception may leave it. */
  int32_t (*interrupted)(void* context);
  void* interrupted_context;
  int32_t state_format;                    /* 0: float32 */
  const optstate_loss_scaler* loss_scaler; /* NULL: the trainer scales */
  int32_t master_format;                   /* 0: float32 */
  int32_t accumulate_dtype;                /* of accumulate; 0: float32 */
  int32_t change_detection; /* for optstate_find_changed; 0: off */
  /* Where a new job's state lives: v1.StorageSettings. For a job that is there,
   * what is set must be what it has. */
  int32_t placement;               /* 0: host */
  int32_t durability;              /* 0: none */
  uint64_t host_budget_bytes;      /* 0: the node's default */
  uint64_t sub_group_elements;     /* 0: likewise */
  uint32_t durability_steps;       /* of OPTSTATE_DURABILITY_EVERY */
  uint32_t durability_interval_ms; /* of OPTSTATE_DURABILITY_INTERVAL */
  int32_t speculative; /* begin steps early; see v1.RegisterRequest */
  /* Keep the parameters on disk too, with OPTSTATE_PLACEMENT_NVME, or when
   * OPTSTATE_PLACEMENT_AUTO comes to that; needs fetches_parameters. The first
   * field: the daemon's memory for them; 0: its default. */
  uint64_t parameter_cache_bytes;
  int32_t parameters_on_disk;
  /* Parameters are fetched one by one (OPTSTATE_PARAMETER) and nowhere in this
   * process whole; over gRPC the memory of a gradient that was pushed is given
   * back. optstate_session_parameter and what reads or maps parameters are
   * FAILED_PRECONDITION then. */
  int32_t fetches_parameters;
  /* 0: `offload_fraction` is not set, which is 1 for a new job. */
  int32_t has_offload_fraction;
  /* The CPU updates this part of the elements, devices the others. */
  double offload_fraction;
  /* optstate_commit prepares the step alone: see c_api_nodes.h. */
  int32_t two_phase;
  /* The memory of each of these devices for records that stay there from step
   * to step; 0: none stay. */
  uint64_t device_budget_bytes;
  const struct optstate_job_access* access; /* NULL: as c_api_access.h says */
} optstate_session_options;

enum {
  OPTSTATE_PLACEMENT_HOST = 1,
  OPTSTATE_PLACEMENT_NVME = 2,
  OPTSTATE_PLACEMENT_AUTO = 3
};
enum {
  OPTSTATE_DURABILITY_NONE = 1,
  OPTSTATE_DURABILITY_STEP = 2,
  OPTSTATE_DURABILITY_EVERY = 3,
  OPTSTATE_DURABILITY_INTERVAL = 4
};

typedef struct {
  size_t struct_size;
  uint64_t step;
  int32_t applied;
  int32_t found_inf;
  double gradient_norm;
  double clip_coefficient;
  uint64_t update_ns;
  double loss_scale;     /* for the next step; 0: no loss scaler */
  uint64_t durable_step; /* the last that survives a reboot; 0: none */
  int32_t prepared;      /* the step is not taken yet: what it will do */
  uint64_t digest; /* of what was prepared; 0: it was taken in one phase */
} optstate_outcome;

typedef struct {
  size_t struct_size;
  uint64_t committed_step;
  int32_t
      phase; /* LOADING: parameters are to be loaded before the first step */
  int32_t created; /* this session's registration made the job */
  size_t piece_count;
  const char*
      endpoint;        /* resolved; for "embedded" the unix: one of the child */
  const char* wire;    /* "shm" or "grpc" */
  int32_t commit_open; /* a commit was interrupted: optstate_commit_wait */
  double loss_scale;   /* for the next step; 0: no loss scaler */
  uint32_t good_steps; /* with hysteresis_left: see v1.LossScalerState */
  uint32_t hysteresis_left;
  uint32_t load_required_from; /* at attaching; see v1.AttachReply */
  /* Counts attachments. With a new one, pin the parameter area anew. */
  uint32_t connections;
} optstate_session_info;

typedef struct {
  size_t struct_size;
  uint32_t parameter;
  uint64_t begin; /* element of the parameter */
  uint64_t numel;
  void* gradient; /* numel elements of the gradient dtype, to be written */
} optstate_piece;

typedef struct {
  size_t struct_size;
  double value[OPTSTATE_HYPERPARAMS_MAX]; /* as optstate_optimizer_info says */
  double max_norm;     /* of the group's gradients; 0: no clipping. The norm is
                          that of optstate_commit's norm_type */
  uint32_t clips_with; /* see v1.GroupHyperparams */
} optstate_hyperparams;

/* Elements [begin, end) of a parameter; see optstate_commit_options. */
typedef struct {
  void* context;
  uint32_t parameter;
  uint64_t begin;
  uint64_t end;
} optstate_part;

typedef struct {
  size_t struct_size;
  uint64_t step;
  const optstate_hyperparams* groups; /* one per group */
  size_t group_count;
  double grad_scale; /* 0: 1 */
  double max_norm;   /* 0: no clipping */
  int32_t found_inf;
  double max_value; /* of each gradient; 0: no clipping */
  double norm_type; /* of max_norm: 1, 2 (also 0) or infinity */
  /* Parameters to be read when the step is applied, as by
   * optstate_read_parameters, but part by part while the step is being applied.
   * After an error their memory may have parts of the step. */
  const uint32_t* read_parameters;
  void* const* read_destinations;
  size_t read_count;
  /* Called, within the call, for each part of a parameter whose destination is
   * NULL, once its values are at the address of optstate_session_parameter: the
   * caller copies them, such as to a device. It must not use the session, and
   * no exception may leave it. */
  void (*part_ready)(const optstate_part* part);
  void* part_ready_context;
  /* The step is prepared (optstate_session_options.two_phase), and committed
   * only once OPTSTATE_VERDICT_CLIP has noted the norm of several nodes or
   * jobs. Without a max_norm alone. */
  int32_t awaits_norm;
} optstate_commit_options;

OPTSTATE_EXPORT const char* optstate_version(void);
OPTSTATE_EXPORT const char* optstate_last_error(void);
/* Describes optimizer `index`, from 0; OUT_OF_RANGE behind the last. */
OPTSTATE_EXPORT int optstate_optimizer(size_t index,
                                       optstate_optimizer_info* info);

/* Connects, registers the layout and attaches the rank. */
OPTSTATE_EXPORT int optstate_session_open(
    const optstate_session_options* options, optstate_session** session);
/* Detaches the rank and frees the session; NULL is allowed. */
OPTSTATE_EXPORT void optstate_session_close(optstate_session* session);
OPTSTATE_EXPORT int optstate_session_get_info(optstate_session* session,
                                              optstate_session_info* info);
/* Fills pieces[0, min(capacity, piece_count)); struct_size of pieces[0] applies
 * to all. Over shared memory the gradients' memory is taken after the session
 * is opened: the call waits until all of these pieces have it, or fails with
 * RESOURCE_EXHAUSTED when there is none, unless struct_size ends before
 * `gradient`. */
OPTSTATE_EXPORT int optstate_session_pieces(optstate_session* session,
                                            optstate_piece* pieces,
                                            size_t capacity);
/* Gives the parameter as of the committed step, in its own dtype; read-only
 * memory, whose values change when a step is committed or a load finished.
 * Those of a speculative job also change from this rank's first push of a step
 * on, and are of no step then, until this function is called again: it has the
 * daemon roll back what was begun of the step, and begin nothing more of it.
 * DATA_LOSS: another process has cut the parameter file short. */
OPTSTATE_EXPORT int optstate_session_parameter(optstate_session* session,
                                               uint32_t parameter,
                                               const void** data,
                                               size_t* bytes);

/* The parameters as memory that the trainer may write (shared memory alone:
 * UNIMPLEMENTED elsewhere, and of a speculative job). The daemon's
 * writes appear in it; the trainer's writes go to private copies until these
 * are released, and the daemon does not see them. The memory outlives the
 * session and ends with optstate_views_free. */
typedef struct optstate_views optstate_views;
OPTSTATE_EXPORT int optstate_views_map(optstate_session* session,
                                       optstate_views** out);
OPTSTATE_EXPORT int optstate_views_parameter(optstate_views* views,
                                             uint32_t parameter, void** data,
                                             size_t* bytes);
/* Finds the parameters, ascending, whose values the trainer has changed from
 * the committed step's; a `capacity` of the number of parameters suffices. */
OPTSTATE_EXPORT int optstate_views_find_written(optstate_session* session,
                                                optstate_views* views,
                                                uint32_t* parameters,
                                                size_t capacity, size_t* count);
/* Drops the trainer's copies: the daemon's values appear again. */
OPTSTATE_EXPORT int optstate_views_release(optstate_views* views);
/* Copies everything: later writes of the daemon do not appear. DATA_LOSS:
 * another process has cut the parameter file short; what was cut off is zeros,
 * and the rest is copied. */
OPTSTATE_EXPORT int optstate_views_keep(optstate_views* views);
OPTSTATE_EXPORT void optstate_views_free(optstate_views* views);

/* The rank's gradient area as memory that the trainer may write whenever no
 * push of its is under way (shared memory alone: UNIMPLEMENTED elsewhere). The
 * address of a piece's gradient in it is optstate_piece.gradient plus
 * *distance. The memory outlives the session and ends with
 * optstate_gradient_views_free. */
typedef struct optstate_gradient_views optstate_gradient_views;
OPTSTATE_EXPORT int optstate_gradient_views_map(optstate_session* session,
                                                optstate_gradient_views** out,
                                                int64_t* distance);
/* Copies `bytes` of a gradient to the part of the memory that begins at `to`,
 * bypassing caches that would not have it for the daemon. */
OPTSTATE_EXPORT int optstate_gradient_views_put(optstate_gradient_views* views,
                                                void* to, const void* gradient,
                                                size_t bytes);
/* Makes the memory private: `count` parts of it, from data[i] on, keep their
 * values, the rest becomes 0, and the area no longer shows what is written
 * there. RESOURCE_EXHAUSTED: nothing has changed. A second call does nothing.
 */
OPTSTATE_EXPORT int optstate_gradient_views_keep(optstate_gradient_views* views,
                                                 const void* const* data,
                                                 const size_t* bytes,
                                                 size_t count);
OPTSTATE_EXPORT void optstate_gradient_views_free(
    optstate_gradient_views* views);

/* Declares that the rank's pieces of parameters [first, +count) hold their
 * gradients of `step` (committed_step + 1). Returns when the push is
 * submitted; an error of the daemon shows here or at commit. After an error
 * nothing of the step is staged: push all of it again. */
OPTSTATE_EXPORT int optstate_push(optstate_session* session, uint64_t step,
                                  uint32_t micro_step, uint32_t first,
                                  uint32_t count);
/* Copies the owned pieces out of whole, contiguous gradients in host memory
 * and pushes them. Parameters that this rank does not own are passed over, and
 * so are those already pushed in this micro-step, whose values the daemon may
 * be reading: abort the step to push other values. A gradient at the very
 * address of its piece, which must be the whole parameter, is pushed without a
 * copy. `parameters` ascends. */
OPTSTATE_EXPORT int optstate_push_gradients(optstate_session* session,
                                            uint64_t step, uint32_t micro_step,
                                            const uint32_t* parameters,
                                            const void* const* gradients,
                                            size_t count);
/* Waits until the engine has taken every push. */
OPTSTATE_EXPORT int optstate_flush(optstate_session* session);
/* Declares that this rank has pushed all its gradients of micro-steps up to
 * this one (possibly none), and waits until the gradient area may be written
 * again; push_gradients of a later micro-step does this too. With
 * OPTSTATE_REPLICATED the call waits for ranks that have not come as far.
 * ABORTED: another rank was lost or has aborted, and the sums of the step are
 * lost. CANCELLED (interrupted): the area may not be written yet; call again.
 */
OPTSTATE_EXPORT int optstate_end_micro_step(optstate_session* session,
                                            uint64_t step, uint32_t micro_step);
/* Waits until every rank has committed and the step is applied or skipped.
 * CANCELLED (interrupted): the commit is still under way, and
 * optstate_commit_wait goes on with it, but fills no read_destinations (then
 * call optstate_read_parameters); no other function of a step may be called
 * before. */
OPTSTATE_EXPORT int optstate_commit(optstate_session* session,
                                    const optstate_commit_options* options,
                                    optstate_outcome* outcome);
OPTSTATE_EXPORT int optstate_commit_wait(optstate_session* session,
                                         optstate_outcome* outcome);
/* Sets *writes to 1 when an interrupted commit's parameters are being written,
 * which a process that has mapped them can see. */
OPTSTATE_EXPORT int optstate_writes_parameters(optstate_session* session,
                                               int32_t* writes);
OPTSTATE_EXPORT int optstate_abort(optstate_session* session, uint64_t step);
/* Copies whole parameters to contiguous host memory of their dtype. */
OPTSTATE_EXPORT int optstate_read_parameters(optstate_session* session,
                                             const uint32_t* parameters,
                                             void* const* destinations,
                                             size_t count);

/* Finds copies made by commit or read_parameters, wherever they are now, whose
 * content has changed since, ascending as `parameters`; `changed` has room for
 * `count` of them. */
OPTSTATE_EXPORT int optstate_find_changed(optstate_session* session,
                                          const uint32_t* parameters,
                                          void* const* copies, size_t count,
                                          uint32_t* changed,
                                          size_t* changed_count);
/* Declares that the caller's copies of these parameters hold the current values
 * without having been read: the caller has loaded the values. */
OPTSTATE_EXPORT int optstate_note_copies(optstate_session* session,
                                         const uint32_t* parameters,
                                         size_t count);

/* Begins a load of initial parameters of a new job, or state of a checkpoint.
 * Every rank begins, loads whole arrays of parameters (optstate_load sends the
 * pieces that the rank owns; STEP_COUNT: one int64), and finishes; finish waits
 * for all ranks. `data` is a whole parameter's array, contiguous, of `dtype`.
 * Over gRPC an error may show at a later load, or at finish. */
OPTSTATE_EXPORT int optstate_begin_load(optstate_session* session);
/* Begins a load in which all ranks load everything, with equal values; when
 * they do not, finish is FAILED_PRECONDITION on all of them and nothing is
 * loaded. */
OPTSTATE_EXPORT int optstate_begin_same_load(optstate_session* session);
OPTSTATE_EXPORT int optstate_load(optstate_session* session, int32_t array,
                                  uint32_t parameter, int32_t dtype,
                                  const void* data);
/* Loads `count` arrays, one after the other. dtypes of step counts are ignored.
 */
OPTSTATE_EXPORT int optstate_load_many(optstate_session* session,
                                       const int32_t* arrays,
                                       const uint32_t* parameters,
                                       const int32_t* dtypes,
                                       const void* const* data, size_t count);
OPTSTATE_EXPORT int optstate_finish_load(optstate_session* session);
/* Copies the whole array of one parameter at the committed step: numel fp32
 * elements (Adafactor's row_var and col_var: one a row, one a column;
 * PARAMETER: of its own dtype; STEP_COUNT: one int64; SCALAR, GRADIENT_NORM,
 * PREPARED_SUM: one double). `step` may be NULL. */
OPTSTATE_EXPORT int optstate_fetch(optstate_session* session, int32_t array,
                                   uint32_t parameter, void* out,
                                   size_t out_bytes, uint64_t* step);
/* Says that these parameters are going to be fetched, or are not any more: a
 * daemon that has them on disk reads them ahead, and keeps them until they are
 * released or a step has changed them, as far as it has room. */
OPTSTATE_EXPORT int optstate_prefetch(optstate_session* session,
                                      const uint32_t* parameters, size_t count);
OPTSTATE_EXPORT int optstate_release(optstate_session* session,
                                     const uint32_t* parameters, size_t count);
/* Copies `count` arrays, each to memory that is large enough for it; over gRPC
 * without a round trip for each. */
OPTSTATE_EXPORT int optstate_fetch_many(optstate_session* session,
                                        const int32_t* arrays,
                                        const uint32_t* parameters,
                                        void* const* outs, size_t count,
                                        uint64_t* step);

#ifdef __cplusplus
}
#endif

#endif /* OPTSTATE_CLIENT_C_API_H_ */
