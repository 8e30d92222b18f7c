package roostream;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.runtime.state.StateInitializationContext;
import org.apache.flink.runtime.state.StateSnapshotContext;
import org.apache.flink.streaming.api.operators.AbstractStreamOperator;
import org.apache.flink.streaming.api.operators.OneInputStreamOperator;
import org.apache.flink.streaming.runtime.streamrecord.StreamRecord;
import org.apache.flink.types.Row;

/**
 * Stores the event time of the partitions that the source before it reads, in the same operator chain, and drops heartbeats
 * (EventFilter). Without the stored times, the first event after a restore could move its partition's time at will, and a producer
 * that was lost together with the task manager would not be waited for.
 */
public final class EventTimeKeeper extends AbstractStreamOperator<Row> implements OneInputStreamOperator<Row, Row> {
    private static final long serialVersionUID = 1L;
    private final EventFilter filter = new EventFilter();
    private transient ListState<byte[]> stored;

    @Override
    public void initializeState(StateInitializationContext context) throws Exception {
        super.initializeState(context);
        // Not union state: a stop with a savepoint ends idle sources before their snapshot and busy ones after it, and Flink refuses a
        // savepoint of union state that only a part of the tasks has ended. With the same parallelism each subtask gets its
        // partitions back. After a change it may get others, and the first event of a partition without a time needs a confirmation.
        stored = context.getOperatorStateStore().getListState(new ListStateDescriptor<>("partition_times", byte[].class));
        if (context.isRestored()) {
            PartitionTime.continueTask();
        }
        for (byte[] partition : stored.get()) {
            PartitionTime.restore(partition);
        }
    }

    @Override
    public void snapshotState(StateSnapshotContext context) throws Exception {
        super.snapshotState(context);
        List<byte[]> partitions = new ArrayList<>();
        for (Map.Entry<Long, PartitionTime> entry : PartitionTime.ofTask().entrySet()) {
            partitions.add(entry.getValue().encode(entry.getKey()));
        }
        stored.update(partitions);
    }

    @Override
    public void processElement(StreamRecord<Row> record) {
        if (filter.filter(record.getValue())) {
            output.collect(record);
        }
    }
}
