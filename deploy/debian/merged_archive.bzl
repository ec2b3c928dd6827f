"""merged_archive: one static library of all our objects that a library needs; those of other projects stay out."""

def _merged_archive_impl(ctx):
    objects = []
    for dep in ctx.attr.deps:
        for linker_input in dep[CcInfo].linking_context.linker_inputs.to_list():
            # Labels of external repositories belong to libraries that the user links.
            if linker_input.owner.workspace_name:
                continue
            for library in linker_input.libraries:
                objects += library.pic_objects or library.objects or []
    archive = ctx.actions.declare_file(ctx.label.name)
    arguments = ctx.actions.args()
    arguments.use_param_file("@%s")
    arguments.set_param_file_format("multiline")

    # q, not r: objects of one name in different folders are different objects. D: no times, no users.
    arguments.add("qcsD")
    arguments.add(archive)
    arguments.add_all(objects)
    ctx.actions.run(
        executable = "/usr/bin/ar",
        arguments = [arguments],
        inputs = objects,
        outputs = [archive],
        mnemonic = "MergeArchives",
    )
    return [DefaultInfo(files = depset([archive]))]

merged_archive = rule(
    implementation = _merged_archive_impl,
    attrs = {"deps": attr.label_list(providers = [CcInfo], mandatory = True)},
)
