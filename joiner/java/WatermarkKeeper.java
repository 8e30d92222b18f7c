package roostream;

import java.util.List;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.runtime.state.StateInitializationContext;
import org.apache.flink.runtime.state.StateSnapshotContext;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.api.watermark.Watermark;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.streaming.runtime.watermarkstatus.WatermarkStatus;
import org.apache.flink.types.Row;

/**
 * Keeps the watermark of the join from going back, in the same operator chain. After a restore Flink starts at MIN_VALUE, and
 * events of requests that the join has forgotten would count as new. This operator stores the watermark in its state and emits
 * it before the first record after a restore.
 */
public final class WatermarkKeeper extends AbstractStreamOperator<Row> implements OneInputStreamOperator<Row, Row> {
    private static final long serialVersionUID = 1L;
    private transient ListState<Long> stored;
    private transient long watermarkMs;
    private transient boolean isEmitted;

    @Override
    public void initializeState(StateInitializationContext context) throws Exception {
        super.initializeState(context);
        // Union state: every subtask needs the watermark after a change of parallelism. All entries of a checkpoint are equal.
        stored = context.getOperatorStateStore().getUnionListState(new ListStateDescriptor<>("watermark", Long.class));
        watermarkMs = Long.MIN_VALUE;
        for (long ms : stored.get()) {
            watermarkMs = Math.max(watermarkMs, ms);
        }
        isEmitted = watermarkMs == Long.MIN_VALUE;
    }

    @Override
    public void snapshotState(StateSnapshotContext context) throws Exception {
        super.snapshotState(context);
        stored.update(List.of(watermarkMs));
    }

    @Override
    public void processElement(StreamRecord<Row> record) throws Exception {
        emitRestored();
        output.collect(record);
    }

    @Override
    public void processWatermark(Watermark mark) throws Exception {
        emitRestored();
        if (mark.getTimestamp() > watermarkMs) {
            watermarkMs = mark.getTimestamp();
            super.processWatermark(mark);
        }
    }

    @Override
    public void processWatermarkStatus(WatermarkStatus status) throws Exception {
        emitRestored();
        super.processWatermarkStatus(status);
    }

    private void emitRestored() throws Exception {
        if (!isEmitted) {
            isEmitted = true;
            super.processWatermark(new Watermark(watermarkMs));
        }
    }
}
