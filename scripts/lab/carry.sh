#!/usr/bin/env bash
# What a bare GPU machine lacks, in the ignored folder carry/: carry/site, packages for its Python,
# and carry/photos, photographs.
#
#     bash scripts/lab/carry.sh FOLDER
#
# FOLDER holds photographs. The machine has torch and what comes with it, but no pydantic and no
# simplejpeg, and it can install nothing: the wheels are unpacked here, and its commands run with
# PYTHONPATH=src:carry/site. PYTHON chooses the Python whose pip downloads, TARGET the one there.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} target=${TARGET:-3.12}
photos=${1:?FOLDER of photographs}

rm -rf carry
mkdir -p carry/wheels carry/site carry/photos

download() {
    "$python" -m pip download --quiet --dest carry/wheels --constraint constraints.txt \
        --python-version "$target" --only-binary=:all: \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 "$@"
}
download pydantic hypothesis starlette uvicorn
download --no-deps simplejpeg google-crc32c pytest-xdist execnet httptools orjson

for wheel in carry/wheels/*.whl; do
    "$python" -m zipfile -e "$wheel" carry/site
done
rm -r carry/wheels
cp "$photos"/* carry/photos/
chmod -R u+w carry

du -sh carry/site carry/photos
echo "$(find carry/photos -type f | wc -l) photographs"
