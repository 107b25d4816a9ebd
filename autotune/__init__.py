"""Measuring launch configurations on a GPU. Never imported by a server."""

if __name__ == "autotune":
    raise ImportError("this folder is sgl_flashsample.autotune: install sgl-flashsample and import it from there")
