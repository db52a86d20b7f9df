"""Has Spark keep the scans of a table apart, which Spark 4.3 does not.

It notes the conditions of a scan of a Python data source at the table, and not at the scan:
`done.where("queue = 'a'").count()` and then `done.count()` count the same rows, and of two scans in
one query both read what the second wants. Later versions note them at the scan. So, in the driver
alone, the class of Spark that notes them is replaced by one that does as those do, before it is
loaded; Spark's own compiler, which compiles its queries, makes it from the Java below.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_PACKAGE: Final = "org.apache.spark.sql.execution.datasources.v2.python"
_CLASS: Final = f"{_PACKAGE}.PythonScanBuilder"
_MARK: Final = "KEEPS_SCANS_APART"
_NOTED_AT_THE_TABLE: Final = "setReadInfo"
"""The method by which a scan notes at its table what is only its own; gone where it does not."""

_SCAN_BUILDER: Final = f"""
package {_PACKAGE};

import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownFilters;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.sources.Filter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;

public class PythonScanBuilder implements SupportsPushDownFilters {{
  public static final boolean {_MARK} = true;

  /** What the table asks of Python once, and the conditions of this scan alone. */
  private static class OfScan extends PythonDataSourceV2 {{
    private final PythonDataSourceV2 table;

    OfScan(PythonDataSourceV2 table) {{ this.table = table; }}

    public UserDefinedPythonDataSource source() {{ return this.table.source(); }}

    public PythonDataSourceCreationResult getOrCreateDataSourceInPython(
        String name, CaseInsensitiveStringMap options, scala.Option schema) {{
      return this.table.getOrCreateDataSourceInPython(name, options, schema);
    }}
  }}

  private final PythonDataSourceV2 ds;
  private final String name;
  private final StructType schema;
  private final CaseInsensitiveStringMap options;
  private Filter[] pushed = new Filter[0];

  public PythonScanBuilder(
      PythonDataSourceV2 ds, String name, StructType schema, CaseInsensitiveStringMap options) {{
    this.ds = new OfScan(ds);
    this.name = name;
    this.schema = schema;
    this.options = options;
  }}

  public Scan build() {{
    return new PythonScan(this.ds, this.name, this.schema, this.options, this.pushed);
  }}

  public Filter[] pushedFilters() {{ return this.pushed; }}

  public Filter[] pushFilters(Filter[] filters) {{
    if (!SQLConf.get().pythonFilterPushDown()) return filters;
    PythonDataSourceCreationResult made = this.ds.getOrCreateDataSourceInPython(
        this.name, this.options, scala.Option.apply(this.schema));
    scala.Option found = this.ds.source().pushdownFiltersInPython(made, this.schema, filters);
    if (found.isEmpty()) return filters;
    PythonFilterPushdownResult result = (PythonFilterPushdownResult) found.get();
    this.ds.setReadInfo(result.readInfo());
    java.util.List taken = new java.util.ArrayList();
    java.util.List left = new java.util.ArrayList();
    for (int at = 0; at < filters.length; at++) {{
      boolean isTaken = ((Boolean) result.isFilterPushed().apply(at)).booleanValue();
      (isTaken ? taken : left).add(filters[at]);
    }}
    this.pushed = (Filter[]) taken.toArray(new Filter[taken.size()]);
    return (Filter[]) left.toArray(new Filter[left.size()]);
  }}
}}
"""

_DEFINER: Final = """
package slatemq;

import java.lang.invoke.MethodHandles;

public class Definer {
  public static Class define(Class beside, byte[] code) throws Exception {
    return MethodHandles.privateLookupIn(beside, MethodHandles.lookup()).defineClass(code);
  }
}
"""


def keep_scans_apart(spark: SparkSession) -> bool:
    """Whether from now on each scan reads what its own conditions want, and nothing else."""
    try:
        gateway: Any = spark.sparkContext._gateway
        find = gateway.jvm.java.lang.Class.forName
        table = find(f"{_PACKAGE}.PythonDataSourceV2")
        if all(method.getName() != _NOTED_AT_THE_TABLE for method in table.getMethods()):
            return True
        _replace(gateway, table)
        if any(field.getName() == _MARK for field in find(_CLASS).getFields()):
            return True
        why = "its own class for them is loaded already"
    except (Py4JError, PySparkException) as error:
        why = str(error).partition("\n")[0]
    log.warning("Spark's scans cannot be kept apart, so tables are read whole: %s", why)
    return False


def _replace(gateway: Any, table: Any) -> None:
    """Define our class beside this one, unless it is there already, ours or Spark's own."""
    definer = _compiled(gateway, table, _DEFINER).getClassLoader().loadClass("slatemq.Definer")
    define = next(method for method in definer.getMethods() if method.getName() == "define")
    codes = dict(_compiled(gateway, table, _SCAN_BUILDER).getBytecodes())
    for name in sorted(codes, reverse=True):  # what is within the class comes before it
        arguments = gateway.new_array(gateway.jvm.java.lang.Object, 2)
        arguments[0], arguments[1] = table, codes[name]
        try:
            define.invoke(None, arguments)
        except Py4JJavaError as error:
            if "LinkageError" not in str(error):
                raise
            return


def _compiled(gateway: Any, table: Any, java: str) -> Any:
    compiler = gateway.jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(table.getClassLoader())
    compiler.cook(java)
    return compiler
