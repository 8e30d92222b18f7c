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
 * Stands before the join, in its chain, so that the join's watermark never goes back: Flink begins anew at MIN_VALUE after a
 * restore, and what the join has forgotten would then be taken for new. The watermark is state, and what comes first after a
 * restore finds it where it was.
 */
public final class WatermarkKeeper extends AbstractStreamOperator<Row> implements OneInputStreamOperator<Row, Row> {
    private static final long serialVersionUID = 1L;
    private transient ListState<Long> kept;
    private transient long watermarkMs;
    private transient boolean isToldOf;

    @Override
    public void initializeState(StateInitializationContext context) throws Exception {
        super.initializeState(context);
        // Union: after a change of the parallelism every subtask needs it. All of a checkpoint's are equal.
        kept = context.getOperatorStateStore().getUnionListState(new ListStateDescriptor<>("watermark", Long.class));
        watermarkMs = Long.MIN_VALUE;
        for (long ms : kept.get()) {
            watermarkMs = Math.max(watermarkMs, ms);
        }
        isToldOf = watermarkMs == Long.MIN_VALUE;
    }

    @Override
    public void snapshotState(StateSnapshotContext context) throws Exception {
        super.snapshotState(context);
        kept.update(List.of(watermarkMs));
    }

    @Override
    public void processElement(StreamRecord<Row> record) throws Exception {
        tell();
        output.collect(record);
    }

    @Override
    public void processWatermark(Watermark mark) throws Exception {
        tell();
        if (mark.getTimestamp() > watermarkMs) {
            watermarkMs = mark.getTimestamp();
            super.processWatermark(mark);
        }
    }

    @Override
    public void processWatermarkStatus(WatermarkStatus status) throws Exception {
        tell();
        super.processWatermarkStatus(status);
    }

    private void tell() throws Exception {
        if (!isToldOf) {
            isToldOf = true;
            super.processWatermark(new Watermark(watermarkMs));
        }
    }
}
