// Generated for release artefacts: the functions of {soname}, which Debian ships without an archive.
// Each is a jump through a slot that is filled at start-up when the library is there, so that the
// artefact neither needs the library to start nor to be built again for another distribution.
#include <dlfcn.h>
#include <stddef.h>

#define SLOTS optstate_slots_{id}

// Takes any arguments; what callers see when the library is missing.
static long Missing(void) { return {missing}; }

#define FUNCTION(i, name) extern char optstate_fallback_##name[] __attribute__((weak));
{functions}
#undef FUNCTION

__attribute__((visibility("hidden"), used)) void* SLOTS[{count}];

static const struct {
  const char* name;
  void* fallback;
} kFunctions[] = {
#define FUNCTION(i, name) {#name, optstate_fallback_##name},
{functions}
#undef FUNCTION
};

__attribute__((constructor(101))) static void FillSlots(void) {
  void* library = dlopen("{soname}", RTLD_NOW | RTLD_LOCAL);
  for (size_t i = 0; i < {count}; ++i) {
    void* function = library ? dlsym(library, kFunctions[i].name) : NULL;
    if (!function) function = kFunctions[i].fallback;
    SLOTS[i] = function ? function : (void*)Missing;
  }
}

#if defined(__x86_64__)
#define JUMP(i, slots) "jmp *" slots "+8*" #i "(%rip)\n"
#elif defined(__aarch64__)
#define JUMP(i, slots)                                        \
  "adrp x16, " slots "+8*" #i "\n"                            \
  "ldr x16, [x16, #:lo12:" slots "+8*" #i "]\nbr x16\n"
#else
#error "no jump for this CPU"
#endif

#define FUNCTION(i, name)                                                   \
  __asm__(".text\n.weak " #name "\n.hidden " #name "\n.type " #name         \
          ", %function\n" #name ":\n" JUMP(i, "optstate_slots_{id}"));
{functions}
