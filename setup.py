"""The one thing that pyproject.toml cannot say: the repository's recipes travel in the wheel as `fathom/recipes/`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copies the recipes beside the modules; an editable install reads them where they are."""

    def run(self) -> None:
        """Build the package, then add the recipes."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "fathom"
            for recipe in sorted(Path("recipes").rglob("*.yaml")):
                self.mkpath(str(folder / recipe.parent))
                self.copy_file(str(recipe), str(folder / recipe.parent))


setup(cmdclass={"build_py": BuildPy})
