"""cuda_toolkit: an external repository with the CUDA Toolkit, or with nothing where there is none.

It is looked for in $CUDA_HOME, then in /usr/local/cuda. No toolkit is no error: targets of cuda.bzl are
then empty, unless --//:cuda=on asks for them.
"""

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
'''

def _cuda_toolkit_impl(ctx):
    home = ctx.os.environ.get("CUDA_HOME", "") or "/usr/local/cuda"
    version = ""
    if ctx.path(home + "/bin/nvcc").exists:
        result = ctx.execute([home + "/bin/nvcc", "--version"])
        words = result.stdout.replace("\n", " ").split(" ")
        version = [word for word in words if word.startswith("V")][-1][1:] if result.return_code == 0 else ""
    if version:
        ctx.symlink(home + "/include", "include")
        ctx.symlink(home + "/lib64/libcudart_static.a", "libcudart_static.a")
    ctx.file("BUILD", _BUILD.format(
        archive = repr(["libcudart_static.a"] if version else []),
        includes = repr(["include"] if version else []),
    ))
    ctx.file("defs.bzl", _DEFS.format(found = bool(version), home = home, version = version))

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["CUDA_HOME"],
    local = True,
)
