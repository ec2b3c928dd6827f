/* The part of optstate's C API that puts a job to sleep and wakes it: its files
 * are on a disk meanwhile (the daemon's sleep_directory), and its memory is
 * given back. Every rank closes its session before, and opens it again
 * afterwards. Views that are not freed by then leave the daemon's memory with
 * optstate_views_leave, which would otherwise be kept for them. */
#ifndef OPTSTATE_CLIENT_C_API_SLEEP_H_
#define OPTSTATE_CLIENT_C_API_SLEEP_H_

#include <stddef.h>
#include <stdint.h>

#include "client/c_api.h"
#include "client/c_api_nodes.h" /* optstate_job_address */

#ifdef __cplusplus
extern "C" {
#endif

/* How far a job has come on its way. bytes_total: 0 while it is not known, and
 * when somebody else has begun it. */
typedef struct {
  void* context;
  uint64_t bytes;
  uint64_t bytes_total;
} optstate_sleep_progress;

typedef struct {
  size_t struct_size;
  /* The bound of the whole; 0: none. The daemon goes on when it has passed.
   * optstate_job_address.timeout_s bounds each wait in which nothing goes on.
   */
  double whole_timeout_s;
  /* Called within the call, about once a second or more often. It must not use
   * the job, and no exception may leave it. May be NULL. */
  void (*progress)(const optstate_sleep_progress* progress);
  void* progress_context;
  /* The job that optstate_wake_job is to wake, as optstate_sleep_job said.
   * Another job of the name, and one that has taken steps since, is not woken.
   * 0: any is. */
  uint64_t expected_created_at_ns;
  uint64_t expected_step;
} optstate_sleep_options;

typedef struct {
  size_t struct_size;
  uint64_t memory_bytes;  /* given back, or taken again */
  int32_t was_so;         /* the job slept, or was awake, before the call */
  uint64_t created_at_ns; /* of the job; 0: not known */
  uint64_t committed_step;
  /* Where the job sleeps, or slept; valid until this thread's next call of
   * these functions. */
  const char* directory;
} optstate_sleep_result;

/* Puts a job to sleep; OK too when it sleeps already. Waits for ranks that have
 * closed their sessions to be gone. FAILED_PRECONDITION: ranks are attached, a
 * step or a load is open, the daemon has no directory for it, or is a private
 * one; RESOURCE_EXHAUSTED: the disk has too little room; UNAVAILABLE: no daemon
 * answers. On these the job is awake. DEADLINE_EXCEEDED, CANCELLED: the daemon
 * goes on if it had begun. `options` may be NULL. */
OPTSTATE_EXPORT int optstate_sleep_job(const optstate_job_address* address,
                                       const optstate_sleep_options* options,
                                       optstate_sleep_result* result);
/* Wakes a job; OK too when it is awake already. FAILED_PRECONDITION: it is not
 * the job that is expected, or its disk is not mounted; RESOURCE_EXHAUSTED: the
 * memory has too little room; DATA_LOSS: a file on the disk is damaged. On
 * these the job sleeps on. The others are as above. */
OPTSTATE_EXPORT int optstate_wake_job(const optstate_job_address* address,
                                      const optstate_sleep_options* options,
                                      optstate_sleep_result* result);

/* Does what optstate_views_keep does, and moves the memory out of the daemon's
 * parameter file, at the same addresses. optstate_views_find_written and
 * optstate_views_release are FAILED_PRECONDITION from then on. After an error
 * all values are as before. */
OPTSTATE_EXPORT int optstate_views_leave(optstate_views* views);

#ifdef __cplusplus
}
#endif

#endif /* OPTSTATE_CLIENT_C_API_SLEEP_H_ */
