"""Does in a running job what `pytracer attach` or `pytracer detach` has ordered.

The job executes this file by its path (`injection.py`), because it may have no pytracer to import. The
order is a JSON file in a folder, and the answer becomes another. Imports only what Python has.
"""


def obey(folder: str) -> None:
    """Does what the order in the folder says, once. Raises nothing: the job is in the middle of its work."""
    import json
    from pathlib import Path

    def answer(**about: object) -> None:
        part = Path(folder, "answer.part")
        try:
            part.write_text(json.dumps(about), encoding="utf-8")
            part.replace(Path(folder, "answer"))
        except OSError:  # who ordered it is gone
            return

    try:
        order = json.loads(Path(folder, "order").read_text(encoding="utf-8"))
        Path(folder, "order").unlink()
    except (OSError, ValueError):
        return
    try:
        problem = _use_our_package(order.pop("package"))
        if problem:
            answer(state="refused", text=problem)
            return
        from pytracer.recording.start import OUR_IMPORTS

        with OUR_IMPORTS:
            from pytracer.recording import attached

            getattr(attached, order.pop("do"))(answer, **order)
    except KeyboardInterrupt:  # is meant for the job
        import _thread

        _thread.interrupt_main()
        answer(state="refused", text="the job was interrupted")
    except BaseException as failed:
        kind = "" if type(failed).__module__ == "pytracer.errors" else f"{type(failed).__name__}: "
        answer(state="refused", text=kind + " ".join(str(failed).split()))


def _use_our_package(package: str) -> str:
    """Makes `import pytracer` find this package. Returns why that cannot be; "" if it can."""
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    own = Path(package).resolve()
    there = sys.modules.get("pytracer")
    spec = getattr(there, "__spec__", None) or importlib.machinery.PathFinder.find_spec("pytracer")
    origin = getattr(spec, "origin", None)
    if origin is not None and Path(origin).resolve().parent != own:
        return f"the job has another pytracer, {origin}: attach with that one"
    if there is None:
        spec = importlib.util.spec_from_file_location(
            "pytracer", own / "__init__.py", submodule_search_locations=[str(own)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["pytracer"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return ""


if __name__ == "ordered":  # not imported
    obey(globals()["folder"])
