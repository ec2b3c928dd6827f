"""cuda_toolkit: an external repository with the CUDA Toolkit, or with nothing where there is none.

It is looked for in $CUDA_HOME, then in /usr/local/cuda, which is said when only the latter has one. No
toolkit is no error: targets of cuda.bzl are then empty, unless --//:cuda=on asks for them.
"""

_USUAL_PLACE = "/usr/local/cuda"

_BUILD = """
package(default_visibility = ["//visibility:public"])

# The host half of the run time, without the driver, which it opens when it starts.
cc_library(
    name = "cudart",
    srcs = {archive},
    hdrs = glob(["include/**"], allow_empty = True),
    includes = {includes},
    linkopts = ["-ldl", "-lpthread", "-lrt"],
)
"""

_DEFS = '''"""The CUDA Toolkit, as it was found."""

FOUND = {found}
HOME = "{home}"
VERSION = "{version}"

# The places where it was looked for, for messages.
PLACES = "{places}"
'''

def _version_at(ctx, home):
    """Returns the version of the toolkit there; empty: there is none."""
    if not ctx.path(home + "/bin/nvcc").exists:
        return ""
    result = ctx.execute([home + "/bin/nvcc", "--version"])
    words = result.stdout.replace("\n", " ").split(" ")
    return [word for word in words if word.startswith("V")][-1][1:] if result.return_code == 0 else ""

def _cuda_toolkit_impl(ctx):
    asked = ctx.os.environ.get("CUDA_HOME", "")
    home = asked or _USUAL_PLACE
    places = home
    version = _version_at(ctx, home)
    if not version and home != _USUAL_PLACE:
        home = _USUAL_PLACE
        places = "{} (CUDA_HOME) or {}".format(asked, home)
        version = _version_at(ctx, home)
    if version and asked not in ["", home]:
        print("CUDA_HOME is {}, where no bin/nvcc runs: the CUDA Toolkit in {} is used".format(asked, home))
    if version:
        ctx.symlink(home + "/include", "include")
        ctx.symlink(home + "/lib64/libcudart_static.a", "libcudart_static.a")
    ctx.file("BUILD", _BUILD.format(
        archive = repr(["libcudart_static.a"] if version else []),
        includes = repr(["include"] if version else []),
    ))
    ctx.file("defs.bzl", _DEFS.format(found = bool(version), home = home, version = version, places = places))

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
