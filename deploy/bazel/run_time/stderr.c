// Archives built for executables read `stderr` where an executable would have copied it to. A shared
// object therefore gets a hidden copy of its own, which points to the same stream.
#include <dlfcn.h>

__attribute__((visibility("hidden"))) void* stderr;

__attribute__((constructor(101))) static void CopyStderr(void) {
  void** original = dlsym(RTLD_DEFAULT, "stderr");
  if (original) stderr = *original;
}
