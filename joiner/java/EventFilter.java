package roostream;

import org.apache.flink.api.common.functions.FilterFunction;
import org.apache.flink.types.Row;

/**
 * Drops heartbeats and end markers (roostream/wire/records.py) after the watermark generator has seen them. Anything else that
 * begins like one goes on to Python, which makes a dead letter of what it can't decode.
 */
public final class EventFilter implements FilterFunction<Row> {
    private static final long serialVersionUID = 1L;

    @Override
    public boolean filter(Row row) {
        TimeSignal signal = TimeSignal.of((byte[]) row.getField(1));
        return signal.kind == TimeSignal.Kind.NOTHING || signal.kind == TimeSignal.Kind.EVENT || !signal.isPlain;
    }
}
