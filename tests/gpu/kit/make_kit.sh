#!/usr/bin/env bash
# Makes kit.tar.xz, 52 MiB, and run.sh beside it: what a machine with a Hopper GPU, Python 3.12
# and PyTorch lacks to run vLLM's CUDA build and the committed state of this checkout.
#
#   make_kit.sh OUT [WORK]
#
#   OUT    directory for the two files
#   WORK   directory that keeps downloads between calls (default: a temporary one); 1.9 GB
#
# Needs PyPI, git, tar, xz, unzip, strip and readelf, and $PYTHON (default: python3) with the package
# `packaging`. Needs no GPU.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../../.." && pwd)
python=$(command -v "${PYTHON:-python3}")
[[ $python == /* ]] || python=$PWD/$python
mkdir -p "$1"
out=$(cd "$1" && pwd)
if [[ ${2:-} ]]; then
    mkdir -p "$2"
    work=$(cd "$2" && pwd)
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
export PYTHONPATH=$project

platforms=()
for tag in manylinux_2_{39,35,34,31,28,27,26,24,17,12,5} manylinux2014 manylinux2010 manylinux1; do
    platforms+=(--platform "${tag}_x86_64")
done

get() { # DIRECTORY NAME...: unpack the wheels of these packages
    local to=$1 wheels=$work/wheels/$1
    shift
    "$python" -m tests.gpu.kit.pins "$@" >"$work/pins.txt"
    mkdir -p "$wheels"
    if ! cmp -s "$work/pins.txt" "$wheels/.pins"; then
        rm -f "$wheels"/*.whl
        "$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
            --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
            --abi none "${platforms[@]}" --dest "$wheels" --requirement "$work/pins.txt"
        cp "$work/pins.txt" "$wheels/.pins"
    fi
    rm -rf "${work:?}/$to"
    for wheel in "$wheels"/*.whl; do unzip -q -o "$wheel" -d "$work/$to"; done
}
get packages
get vllm vllm
get nixl nixl nixl-cu13

kit=$work/kit site=$work/kit/site
rm -rf "$kit"
mkdir -p "$site" "$kit/app"
cp -r "$work/packages/." "$here/stubs/." "$site/"

# vLLM: its Python code, and the libraries that one GPU of this kind needs, without other GPUs' code.
cd "$work/vllm"
find vllm vllm-*.dist-info -type f -not -name '*.so' -not -name '*.cuh' -not -name '*.html' \
    -not -name '*.map' -not -path 'vllm/vllm-rs*' -not -path 'vllm/third_party/deep_gemm/*' \
    \( -name '*.py' -o -not -path 'vllm/third_party/fmha_sm100/*' -not -path 'vllm/third_party/tml_fa4/*' \) \
    >"$work/vllm_files"
tar -c -T "$work/vllm_files" | tar -x -C "$site"
for library in _C_stable_libtorch vllm_flash_attn/_vllm_fa3_C; do
    "$python" -m tests.gpu.kit.fatbin "vllm/$library.abi3.so" "$site/vllm/$library.abi3.so"
    strip --strip-all "$site/vllm/$library.abi3.so"
done
for library in cumem_allocator fs_io_C spinloop; do cp "vllm/$library.abi3.so" "$site/vllm/"; done

# NIXL, with UCX for host memory and the GPU's.
cd "$work/nixl"
rm -rf nixl_ep*
{
    "$python" -m tests.gpu.kit.libraries . nixl_cu13/*.so .nixl_cu13.mesonpy.libs/libnixl.so \
        .nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so nixl_cu13.libs/nixl/libplugin_UCX.so \
        nixl_cu13.libs/ucx/lib{uct_cma,uct_cuda,ucm_cuda}.so.0.0.0
    find nixl nixl_cu13 ./*.dist-info nixl_meta_utils.py -type f -not -name '*.so'
} >"$work/nixl_files"
tar -c -T "$work/nixl_files" | tar -x -C "$site"

# Smaller. The licence of each package stays, in its .dist-info.
cd "$site"
find . \( -name __pycache__ -o -name tests -o -name test \) -type d -prune -exec rm -rf {} +
find . -name '*.pyi' -delete
find . -type f \( -name '*.so' -o -name '*.so.*' \) -size +200k -not -path './vllm/*' -exec strip --strip-unneeded {} +
rm -rf ./*.dist-info/RECORD ./*.data

cd "$project"
git archive HEAD backend_worker common examples frontend tests pyproject.toml LICENSE | tar -x -C "$kit/app"
git rev-parse HEAD >"$kit/app/COMMIT"

tar -c -C "$work" --sort=name --owner=0 --group=0 --mtime=@0 kit | xz -T2 -6 >"$out/kit.tar.xz"
cp "$here/run.sh" "$out/"
ls -l "$out"
