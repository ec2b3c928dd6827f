/* The header as a C program sees it: one whole run through the C API. */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "client/c_api.h"
#include "client/c_api_access.h"
#include "client/c_api_devices.h" /* only that it is C */
#include "client/c_api_sleep.h" /* only that it is C */

/* Returns 0, or the line on which it went wrong. */
#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!(condition)) {                                                  \
      fprintf(stderr, "line %d: %s\n", __LINE__, optstate_last_error()); \
      return __LINE__;                                                   \
    }                                                                    \
  } while (0)

static int load(optstate_session* session) {
  const float values[6] = {1, 1, 1, 1, 1, 1};
  uint32_t i;
  CHECK(optstate_begin_load(session) == 0);
  for (i = 0; i < 2; ++i) {
    CHECK(optstate_load(session, OPTSTATE_MASTER, i, OPTSTATE_FLOAT32,
                        values) == 0);
  }
  CHECK(optstate_finish_load(session) == 0);
  return 0;
}

static int step(optstate_session* session) {
  const float gradient[6] = {1, 1, 1, 1, 1, 1};
  const uint32_t parameters[2] = {0, 1};
  const void* gradients[2];
  optstate_hyperparams group = {0};
  optstate_commit_options commit = {0};
  optstate_outcome outcome = {0};
  gradients[0] = gradients[1] = gradient;
  group.struct_size = sizeof(group);
  group.value[0] = 0.5;
  group.value[1] = 0.9;
  group.value[2] = 0.999;
  group.value[3] = 1e-8;
  commit.struct_size = sizeof(commit);
  commit.step = 1;
  commit.groups = &group;
  commit.group_count = 1;
  outcome.struct_size = sizeof(outcome);
  CHECK(optstate_push_gradients(session, 1, 0, parameters, gradients, 2) == 0);
  CHECK(optstate_flush(session) == 0);
  CHECK(optstate_commit(session, &commit, &outcome) == 0);
  CHECK(outcome.step == 1 && outcome.applied && !outcome.found_inf);
  CHECK(fabs(outcome.gradient_norm - sqrt(10.0)) < 1e-12);
  return 0;
}

static int look(optstate_session* session) {
  const uint32_t parameters[2] = {0, 1};
  float first[6];
  float second[4];
  float fetched[6];
  void* destinations[2];
  const void* data;
  size_t bytes;
  uint64_t at;
  int64_t steps;
  destinations[0] = first;
  destinations[1] = second;
  CHECK(optstate_read_parameters(session, parameters, destinations, 2) == 0);
  /* Adam's first step is lr in every element. */
  CHECK(fabsf(first[5] - 0.5f) < 1e-5f && fabsf(second[3] - 0.5f) < 1e-5f);
  CHECK(optstate_session_parameter(session, 0, &data, &bytes) == 0);
  CHECK(bytes == sizeof(first) && memcmp(data, first, bytes) == 0);
  CHECK(optstate_fetch(session, OPTSTATE_MASTER, 0, fetched, sizeof(fetched),
                       &at) == 0);
  CHECK(at == 1 && memcmp(fetched, first, sizeof(first)) == 0);
  CHECK(optstate_fetch(session, OPTSTATE_STEP_COUNT, 1, &steps, sizeof(steps),
                       NULL) == 0);
  CHECK(steps == 1);
  return 0;
}

int optstate_test_run_in_c(const char* endpoint) {
  const int64_t shape[2] = {2, 3};
  const int64_t flat[1] = {4};
  optstate_parameter parameters[2] = {{0}, {0}};
  optstate_group group = {0};
  optstate_session_options options = {0};
  optstate_session* session = NULL;
  optstate_session_info info = {0};
  optstate_piece pieces[2] = {{0}, {0}};
  int line;
  parameters[0].struct_size = parameters[1].struct_size = sizeof(parameters[0]);
  parameters[0].name = "weight";
  parameters[0].shape = shape;
  parameters[0].ndim = 2;
  parameters[0].numel = 6;
  parameters[1].name = "bias";
  parameters[1].shape = flat;
  parameters[1].ndim = 1;
  parameters[1].numel = 4;
  parameters[0].dtype = parameters[1].dtype = OPTSTATE_FLOAT32;
  parameters[0].gradient_dtype = OPTSTATE_FLOAT32;
  parameters[1].gradient_dtype = OPTSTATE_FLOAT32;
  group.struct_size = sizeof(group);
  options.struct_size = sizeof(options);
  options.endpoint = endpoint;
  options.job = "in-c";
  options.optimizer = OPTSTATE_ADAMW;
  options.world_size = 1;
  options.ephemeral = 1;
  options.groups = &group;
  options.group_count = 1;
  options.parameters = parameters;
  options.parameter_count = 2;
  CHECK(optstate_session_open(&options, &session) == 0);
  info.struct_size = sizeof(info);
  CHECK(optstate_session_get_info(session, &info) == 0);
  CHECK(info.created && info.phase == OPTSTATE_PHASE_LOADING);
  CHECK(info.piece_count == 2 && strcmp(info.endpoint, endpoint) == 0);
  pieces[0].struct_size = sizeof(pieces[0]);
  CHECK(optstate_session_pieces(session, pieces, 2) == 0);
  CHECK(pieces[1].parameter == 1 && pieces[1].numel == 4);
  CHECK(pieces[0].gradient != NULL);
  /* A struct that ends before `gradient` asks for no memory. */
  pieces[0].struct_size = offsetof(optstate_piece, gradient);
  pieces[0].numel = 0;
  pieces[0].gradient = NULL;
  CHECK(optstate_session_pieces(session, pieces, 1) == 0);
  CHECK(pieces[0].numel == 6 && pieces[0].gradient == NULL);
  pieces[0].struct_size = sizeof(pieces[0]);
  if ((line = load(session)) != 0) return line;
  if ((line = step(session)) != 0) return line;
  if ((line = look(session)) != 0) return line;
  optstate_session_close(session);
  return 0;
}
