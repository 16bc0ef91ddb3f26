"""Packaging of towers: `pip install .` installs the library and the `towers` command.

The models, configs, scripts and tests stay in the checkout: their names would collide with those of
other projects in site-packages.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Read `__version__` from the package's source: importing it would need its dependencies."""
    source = (ROOT / "towers" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise ValueError('towers/__init__.py has no line of the form __version__ = "1.2.3"')
    return found.group(1)


def read_readme() -> str:
    """Read README.md, or nothing where there is none."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


class CleanBuild(build_py):
    """Builds the package into an empty folder.

    A wheel holds whatever lies in build/lib, so an earlier build of the same checkout would leave
    modules in it that have since been renamed or deleted.
    """

    def run(self) -> None:
        """Empty the folder that the wheel is made from, then build."""
        if not getattr(self, "editable_mode", False):
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    name="towers",
    version=read_version(),
    description="Train Keras models on several GPUs, with the results of one (Linux, or WSL 2)",
    long_description=read_readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    keywords="tensorflow keras data-parallel multi-gpu training cifar-10",
    python_requires=">=3.10",
    packages=find_packages(include=["towers", "towers.*"]),
    cmdclass={"build_py": CleanBuild},
    install_requires=[
        # `scripts/compatibility` tries the oldest and the newest; TensorFlow names its TensorBoard.
        "tensorflow>=2.18",
        "keras>=3.12",
        "tensorboard>=2.18",
        "numpy",
        "absl-py",
        "nvidia-ml-py",
        "packaging",
        "pillow",
    ],
    extras_require={
        "gpu": ["tensorflow[and-cuda]>=2.18"],
        # TensorBoard's page for the traces of --profile_steps; 2.24 opens those of TensorFlow 2.21.
        "profile": ["tensorboard-plugin-profile>=2.24,<3"],
        # What `scripts/speed` measures besides TensorFlow, as in README's table.
        "peers": ["torch==2.13.0"],
        "test": [
            "build",
            "hypothesis",
            "pandas",  # the guide's snippet for tables
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=64",
            "wheel",
        ],
    },
    entry_points={"console_scripts": ["towers = towers.__main__:main"]},
)
