"""Shows invocations: call functions in the workspace, and make calls repeatable by an id."""

from atoll import Atoll

MODULE = """
import os

def total(order):
    return sum(item["price"] for item in order["items"])

def ship(order):
    if not os.path.exists("stock"):
        raise RuntimeError("out of stock")
    return f"order {order['id']} is on its way"
"""
ORDER = {"id": 17, "items": [{"price": 3}, {"price": 4}]}

with Atoll() as atoll, atoll.session() as session:
    session.files.write("shop.py", MODULE)

    invocation = session.invoke("shop:total", input=ORDER, metadata={"order": "17"})
    print(invocation.status, invocation.result().return_value)

    # Two calls with the same id run the function once.
    for _ in range(2):
        shipment = session.invoke("shop:ship", input=ORDER, invocation_id="ship-17")
    error = shipment.result().error
    assert error is not None
    print(shipment.status, error.message, len(list(shipment.executions())))

    # A new execution id retries the failed invocation.
    session.files.write("stock", "")
    retried = session.invoke(
        "shop:ship", input=ORDER, invocation_id="ship-17", execution_id="ship-17-again"
    )
    print(retried.status, retried.result().return_value, len(list(retried.executions())))
