// Settings of the thread sanitizer. gRPC and protobuf are not compiled with it:
// it sees their calls of free() and sendmsg(), but not the atomics that order
// these, nor those by which a thread of gRPC takes over a call whose end it
// then reports.
// NOLINTNEXTLINE(bugprone-reserved-identifier): looked up by this name.
extern "C" const char* __tsan_default_suppressions() {
  return "deadlock:grpc\n"
         "race:grpc::internal::CallbackWithStatusTag\n"
         "race:google::protobuf::\n";
}

// NOLINTNEXTLINE(bugprone-reserved-identifier): looked up by this name.
extern "C" const char* __tsan_default_options() {
  return "history_size=4:ignore_noninstrumented_modules=1";
}
