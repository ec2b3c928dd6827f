/* The part of optstate's C API that says who may use a new job besides its
 * owner; see v1.JobAccess. A job that is there keeps its own: a session that
 * asks for another says so in a line on stderr, and `optctl set job` changes
 * it. */
#ifndef OPTSTATE_CLIENT_C_API_ACCESS_H_
#define OPTSTATE_CLIENT_C_API_ACCESS_H_

#include <stddef.h>
#include <stdint.h>

#include "client/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A job's access rights, for optstate_session_options.access. NULL there: all
 * who may look at jobs may look at a new one, and its owner alone may use it.
 * Names are those of the daemon's machine, or numbers. INVALID_ARGUMENT: it has
 * no such user or group, or the owner is not in the group; FAILED_PRECONDITION:
 * the daemon is a private one; UNIMPLEMENTED: it is of an older build, and the
 * job is there for all to look at. */
typedef struct optstate_job_access {
  size_t struct_size;
  const char* group;  /* whose members may do what the owner may; NULL: none */
  int32_t is_private; /* not 0: for others there is no such job */
  const char* const* readers; /* users, and groups as "@NAME", who may look */
  size_t reader_count;        /* 0 unless is_private */
} optstate_job_access;

#ifdef __cplusplus
}
#endif

#endif /* OPTSTATE_CLIENT_C_API_ACCESS_H_ */
