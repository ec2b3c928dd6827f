"""optstate_wheel: a Python wheel from a package's files and programs."""

def _wheel_impl(ctx):
    wheel = ctx.actions.declare_file("optstate-{}-py3-none-{}.whl".format(ctx.attr.version, ctx.attr.platform))
    arguments = ctx.actions.args()
    arguments.add(ctx.file._builder)
    arguments.add("--output", wheel)
    arguments.add("--platform", ctx.attr.platform)
    arguments.add("--pyproject", ctx.file.pyproject)
    arguments.add("--readme", ctx.file.readme)
    arguments.add("--license", ctx.file.license)
    arguments.add("--version-header", ctx.file.version_header)
    arguments.add("--package", ctx.label.package + "/optstate")
    arguments.add_all(ctx.files.programs, before_each = "--program")
    arguments.add_all(ctx.files.srcs)
    ctx.actions.run(
        executable = "/usr/bin/python3",
        arguments = [arguments],
        inputs = [
            ctx.file._builder,
            ctx.file.pyproject,
            ctx.file.readme,
            ctx.file.license,
            ctx.file.version_header,
        ] + ctx.files.programs + ctx.files.srcs,
        outputs = [wheel],
        mnemonic = "Wheel",
    )
    return [DefaultInfo(files = depset([wheel]))]

optstate_wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "version": attr.string(mandatory = True, doc = "checked against version_header"),
        "platform": attr.string(mandatory = True, doc = "platform tag of what was linked"),
        "srcs": attr.label_list(allow_files = True, doc = "files of the package: those below optstate/ keep their folders"),
        "programs": attr.label_list(allow_files = True, doc = "more files beside them, executable"),
        "pyproject": attr.label(allow_single_file = True, mandatory = True),
        "readme": attr.label(allow_single_file = True, mandatory = True),
        "license": attr.label(allow_single_file = True, mandatory = True),
        "version_header": attr.label(allow_single_file = True, mandatory = True),
        "_builder": attr.label(allow_single_file = True, default = "//client/python:build_wheel.py"),
    },
)
