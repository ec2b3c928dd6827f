/* The part of optstate's C API for a rank whose parameters are on a device on
 * which records of the job stay (device_budget): it copies the new parameters
 * from memory of that device, without a way through host memory, and lets the
 * device take gradients from memory of the rank's there. */
#ifndef OPTSTATE_CLIENT_C_API_DEVICES_H_
#define OPTSTATE_CLIENT_C_API_DEVICES_H_

#include <stddef.h>
#include <stdint.h>

#include "client/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements [begin, end) of a parameter, in its own dtype, from a byte of the
 * memory on. */
typedef struct {
  size_t struct_size;
  uint64_t begin;
  uint64_t end;
  uint64_t offset_bytes;
} optstate_device_range;

/* The offset of what is not there. */
#define OPTSTATE_NOWHERE UINT64_MAX

typedef struct optstate_device_parameters optstate_device_parameters;

/* Asks the engine for the memory of the device of this name. CUDA: its UUID, as
 * 8-4-4-4-12 lower case hexadecimal digits. NOT_FOUND: nothing of the job stays
 * on a device; UNIMPLEMENTED: the wire copies; FAILED_PRECONDITION,
 * RESOURCE_EXHAUSTED and others: why there is none. optstate_session_parameter
 * has all of the values, as always. It ends with
 * optstate_device_parameters_free, also after the session. */
OPTSTATE_EXPORT int optstate_device_parameters_map(
    optstate_session* session, const char* device,
    optstate_device_parameters** out);
/* The file of the memory, which stays this object's, for
 * cuMemImportFromShareableHandle (a POSIX file descriptor), and the bytes to be
 * mapped. The memory is only read. */
OPTSTATE_EXPORT int optstate_device_parameters_memory(
    const optstate_device_parameters* parameters, int* file, uint64_t* bytes);
/* Says whether the engine uses the memory no more: to be asked for anew. */
OPTSTATE_EXPORT int optstate_device_parameters_is_over(
    const optstate_device_parameters* parameters, int32_t* is_over);
/* Finds the parts of a parameter that are there, ascending, with the values of
 * optstate_session_parameter, for as long as those stay. What is in no range
 * comes from there. None when the session has connected anew since: then it is
 * to be asked for anew. Writes at most `capacity` ranges, whose first one has
 * its struct_size set, and says in `count` how many there are. */
OPTSTATE_EXPORT int optstate_device_parameters_find(
    optstate_session* session, const optstate_device_parameters* parameters,
    uint32_t parameter, optstate_device_range* ranges, size_t capacity,
    size_t* count);
/* Finds likewise where whole parameters are, as offsets in bytes.
 * OPTSTATE_NOWHERE: it is not there, or in several parts. */
OPTSTATE_EXPORT int optstate_device_parameters_find_whole(
    optstate_session* session, const optstate_device_parameters* parameters,
    const uint32_t* wanted, size_t count, uint64_t* offsets);
OPTSTATE_EXPORT void optstate_device_parameters_free(
    optstate_device_parameters* parameters);

typedef struct optstate_device_gradients optstate_device_gradients;

/* Offers the engine memory of the device of this name, in which the rank has
 * gradients besides its gradient area: a file that the driver has exported
 * (cuMemExportToShareableHandle, a POSIX file descriptor), which stays the
 * caller's, and its bytes. The engine reads the memory until other memory is
 * offered, this is given up, or the session ends. NOT_FOUND: nothing of the job
 * stays on a device, or its updates read sums of gradients; UNIMPLEMENTED: the
 * wire copies; FAILED_PRECONDITION and others: why the engine takes none from
 * there. All gradients are written to the gradient area as well, as always. It
 * ends with optstate_device_gradients_free, also after the session. */
OPTSTATE_EXPORT int optstate_device_gradients_share(
    optstate_session* session, const char* device, int memory_file,
    uint64_t memory_bytes, optstate_device_gradients** out);
/* Says that the gradients of a step of these parameters, this rank's pieces of
 * them, are in the memory at these offsets in bytes, which are multiples of 16,
 * with the bytes of the gradient area: before they are pushed. They stay until
 * the step's outcome. */
OPTSTATE_EXPORT int optstate_device_gradients_mark(
    optstate_device_gradients* gradients, uint64_t step,
    const uint32_t* parameters, const uint64_t* offsets, size_t count);
/* Says that the memory has none of these: before their bytes change. */
OPTSTATE_EXPORT int optstate_device_gradients_clear(
    optstate_device_gradients* gradients, const uint32_t* parameters,
    size_t count);
/* Says whether the engine has that memory. It has not once the session has
 * connected anew: then it is to be offered anew. */
OPTSTATE_EXPORT int optstate_device_gradients_is_shared(
    optstate_session* session, const optstate_device_gradients* gradients,
    int32_t* is_shared);
/* Gives up what the session has offered: nothing reads it any more. */
OPTSTATE_EXPORT int optstate_device_gradients_give_up(
    optstate_session* session);
OPTSTATE_EXPORT void optstate_device_gradients_free(
    optstate_device_gradients* gradients);

#ifdef __cplusplus
}
#endif

#endif /* OPTSTATE_CLIENT_C_API_DEVICES_H_ */
