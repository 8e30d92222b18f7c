package roostream;

import org.apache.flink.api.common.functions.FilterFunction;
import org.apache.flink.types.Row;

/**
 * Drops what has done its work once the watermark generator has seen it: heartbeats and end markers (roostream/wire/records.py) as our writers
 * write them. Whatever else begins like one goes on to Python, which makes a dead letter of what can't be read.
 */
public final class EventFilter implements FilterFunction<Row> {
    private static final long serialVersionUID = 1L;

    @Override
    public boolean filter(Row row) {
        TimeSignal signal = TimeSignal.of((byte[]) row.getField(1));
        return signal.kind == TimeSignal.Kind.NOTHING || signal.kind == TimeSignal.Kind.EVENT || !signal.isPlain;
    }
}
